import dataclasses
import re

from maxlm.reporting.run import make_runs
from maxlm.reporting.sections.learning import learning
from tests import workdirs


def titles(text):
    return re.findall(r'<figcaption>([^<]*?) ?<', text)


def overfitted(run):
    """The same with other validation losses."""
    lines = [
        {**line, 'eval/loss': 3.0 + abs(line['step'] - 200) / 200} if 'eval/loss' in line else line
        for line in run.history.metrics
    ]
    return make_runs([dataclasses.replace(run.history, metrics=lines)], workdirs.NOW)


def test_one_run(run_of):
    text = learning(run_of('finished'))
    assert titles(text) == [
        *('Training and validation loss', 'Training loss by source', 'Validation loss by source'),
        *('Learning rate', 'Gradient norm', 'Throughput', 'MFU', 'Memory of a device', 'Wait for data'),
    ]
    assert 'No overfitting' in text
    assert 'class="shade"' not in text
    assert f'best {workdirs.validation_loss(400):.4f} at step 400' in text
    assert '<td class="t">web</td><td>900k</td><td>70.0%</td>' in text


def test_overfitting_is_tinted(run_of):
    text = learning(overfitted(run_of('finished')[0]))
    assert 'class="shade"' in text
    assert 'Tinted: the stretch' in text


def test_several_runs_have_a_curve_each_and_a_chart_for_each_source(run_of):
    text = learning(run_of('finished', 'crashed'))
    assert 'Training loss: web' in titles(text)
    assert 'finished: training' in text
    assert 'crashed: validation' in text
    assert '<li>' in text
    assert '"line c1 d0"' in text


def test_before_the_first_line_there_is_nothing(run_of):
    assert learning(run_of('fresh')) == learning(run_of('empty')) == ''


def test_a_diverged_run_says_what_is_not_finite(run_of):
    assert 'values are not finite' in learning(run_of('diverged'))
    assert 'values are not finite' not in learning(run_of('finished'))
