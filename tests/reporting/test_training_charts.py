import dataclasses
import json
import math
import re

import pytest

from maxlm.reporting.page import section
from maxlm.reporting.run_summary import make_runs
from tests import workdirs


def training_curves(runs):
    """Returns the sections with charts over the steps."""
    return ''.join(section(name, runs) for name in ('loss', 'sources', 'curves'))


def charts_of(text):
    """Returns the data of all charts."""
    return [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', text)]


def titles(text):
    return re.findall(r'<figcaption>([^<]*?) ?<', text)


def overfitted(run):
    """Returns the run with other validation losses."""
    lines = [
        {**line, 'eval/loss': 3.0 + abs(line['step'] - 200) / 200} if 'eval/loss' in line else line
        for line in run.history.metrics
    ]
    return make_runs([dataclasses.replace(run.history, metrics=lines)], workdirs.NOW)


def test_one_run(run_of):
    text = training_curves(run_of('finished'))
    assert titles(text) == [
        *('Training and validation loss', 'Training loss by source', 'Validation loss by source'),
        *('Learning rate', 'Gradient norm', 'Throughput', 'MFU', 'Device memory', 'Data loading time'),
    ]
    assert 'No overfitting' in text
    assert {chart['shade'] for chart in charts_of(text)} == {None}
    loss = workdirs.validation_loss(400)
    assert f'best {loss:.4f} = {loss * 0.25 / math.log(2):.4f} bits per byte at step 400' in text
    assert '<td class="t">web</td><td>900k</td><td>70.0%</td>' in text


def test_the_unigram_entropy_is_a_line_of_the_chart(run_of):
    (chart, *_) = charts_of(training_curves(run_of('finished')))
    assert [one['name'] for one in chart['series']] == ['training', 'validation', 'unigram entropy']
    # It needs the event of a start that knows it.
    (run,) = run_of('finished')
    events = [{name: value for name, value in event.items() if name != 'baseline'} for event in run.history.events]
    older = make_runs([dataclasses.replace(run.history, events=events)], workdirs.NOW)
    assert len(charts_of(training_curves(older))[0]['series']) == 2


def test_overfitting_is_shaded(run_of):
    text = training_curves(overfitted(run_of('finished')[0]))
    assert charts_of(text)[0]['shade'] == [200, 400]
    assert 'Shaded: the steps' in text


def test_several_runs_have_one_curve_each_and_one_chart_per_source(run_of):
    text = training_curves(run_of('finished', 'crashed'))
    assert 'Training loss: web' in titles(text)
    assert 'finished: training' in text
    assert 'crashed: validation' in text
    (chart,) = [chart for chart in charts_of(text) if chart['title'] == 'Gradient norm']
    assert [(one['name'], one['run'], one['color']) for one in chart['series']] == [
        ('finished', 0, 0),
        ('crashed', 1, 1),
    ]


def variant(run, name, objective, **dataset):
    """Returns the history of the run under another name, with another objective and data."""
    config = run.history.config
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, objective=objective))
    events = [
        {**event, 'dataset': event['dataset'] | dataset} if event['kind'] == 'started' else event
        for event in run.history.events
    ]
    return dataclasses.replace(run.history, workdir=name, config=config, events=events)


@pytest.mark.parametrize(
    ('objective', 'dataset', 'reasons', 'charts', 'charts_of_web'),
    [
        ('next_token', {}, '', [''], ['']),
        ('next_token', {'dataset web': 'other'}, 'data', [', base and more', ', chat'], [', base and more', ', chat']),
        ('next_token', {'weight web': 0.9}, 'data', [', base and more', ', chat'], ['']),
        ('dpo', {'window': 512}, 'objectives', [', base and more', ', chat'], [', base and more', ', chat']),
        ('dpo', {'prompts': 'x'}, 'data and objectives', [', base and more', ', chat'], [', base and more', ', chat']),
    ],
)
def test_losses_that_cannot_be_compared_have_separate_charts(
    run_of, objective, dataset, reasons, charts, charts_of_web
):
    (run,) = run_of('finished')
    histories = [variant(run, 'base', 'next_token'), variant(run, 'chat', objective, **dataset)]
    histories.append(variant(run, 'more', 'next_token', window=128))
    text = training_curves(make_runs(histories, workdirs.NOW))
    assert re.findall(r'Losses of runs with different (.*) cannot be compared', text) == [reasons] * bool(reasons)
    found = titles(text)
    assert [title for title in found if 'and validation' in title] == [
        f'Training and validation loss{end}' for end in charts
    ]
    assert [title for title in found if 'ing loss: web' in title] == [
        f'Training loss: web{end}' for end in charts_of_web
    ]
    # Each run is drawn once.
    names = [one['name'] for chart in charts_of(text) for one in chart['series']]
    assert all(names.count(f'{name}: validation') == 1 for name in ('base', 'chat', 'more'))


def test_unknown_data_counts_as_the_same(run_of):
    (run,) = run_of('finished')
    unknown = dataclasses.replace(run.history, workdir='old', config=None, events=[])
    text = training_curves(make_runs([run.history, unknown], workdirs.NOW))
    assert 'cannot be compared' not in text
    assert 'Training and validation loss' in titles(text)


def test_no_curves_before_the_first_line(run_of):
    assert training_curves(run_of('fresh')) == training_curves(run_of('empty')) == ''


def test_diverged_run_reports_nonfinite_values(run_of):
    assert 'values are not finite' in training_curves(run_of('diverged'))
    assert 'values are not finite' not in training_curves(run_of('finished'))


def test_a_run_without_finite_losses_has_no_chart_of_them(run_of):
    """The chart of a run with rewards has no line for the unigram entropy, so it would be empty."""
    (run,) = run_of('finished')
    rewarded = [{**line, 'rollout/reward': 0.5} for line in run.history.metrics]
    diverged = [{**line, 'train/loss': None, 'eval/loss': None} for line in rewarded]
    for lines, has_chart in ((rewarded, True), (diverged, False)):
        text = training_curves(make_runs([dataclasses.replace(run.history, metrics=lines)], workdirs.NOW))
        assert ('Training and validation loss' in titles(text)) == has_chart
        assert 'Gradient norm' in titles(text)
