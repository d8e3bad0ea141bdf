from maxlm.reporting.sections.plan_vs_actual import plan_vs_actual


def test_planned_actual_and_their_ratio(run_of):
    text = plan_vs_actual(run_of('finished'))
    assert '<td class="t">step time</td><td>0.45 s</td><td>0.50 s</td><td>1.11</td>' in text
    assert '<td class="t">device memory</td><td>41.0 GiB</td><td>44.0 GiB</td><td>1.07</td>' in text
    assert 'so far' not in text
    assert 'so far' in plan_vs_actual(run_of('running'))


def test_without_a_price_the_cost_is_a_dash(run_of):
    assert '<td class="t">cost</td><td>–</td><td>–</td><td>–</td>' in plan_vs_actual(run_of('on_cpu'))


def test_several_runs(run_of):
    assert '<td>0.45 s → 0.50 s (1.11)</td>' * 2 in plan_vs_actual(run_of('finished', 'crashed'))


def test_without_a_plan(run_of):
    assert plan_vs_actual(run_of('empty')) == ''
