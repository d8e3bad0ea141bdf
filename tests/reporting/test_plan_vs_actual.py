from maxlm.reporting.page import section


def test_planned_actual_and_their_ratio(run_of):
    text = section('plan', run_of('finished'))
    assert '<td class="t">step time</td><td>0.45 s</td><td>0.50 s</td><td>1.11</td>' in text
    assert '<td class="t">device memory</td><td>41.0 GiB</td><td>44.0 GiB</td><td>1.07</td>' in text
    assert 'so far' not in text
    assert 'so far' in section('plan', run_of('running'))


def test_figures_that_are_neither_planned_nor_measured_have_no_row(run_of):
    assert '>cost<' not in section('plan', run_of('on_cpu'))
    assert '>cost<' in section('plan', run_of('finished'))


def test_several_runs(run_of):
    assert '<td>0.45 s → 0.50 s (1.11)</td>' * 2 in section('plan', run_of('finished', 'crashed'))


def test_without_a_plan(run_of):
    assert section('plan', run_of('empty')) == ''
