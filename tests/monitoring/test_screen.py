"""Tests that the dashboard fits terminals of every size, without truncated or missing numbers."""

import random
import re

import pytest

from maxlm.monitoring import panels
from maxlm.monitoring.dashboard_data import dashboard_data
from maxlm.monitoring.screen import page, screen, table
from maxlm.telemetry.run_history import read_history
from tests import workdirs
from tests.telemetry.test_run_history import damage
from tests.workdirs import BUILDERS, NOW

SIZES = [(80, 24), (200, 60), (130, 24), (40, 10), (20, 5), (300, 100), (1, 1)]


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    return {name: dashboard_data(read_history(build(folder / name)), NOW) for name, build in BUILDERS.items()}


def texts(lines):
    return [line.plain for line in lines]


def numbers(text):
    return set(re.findall(r'\d[\d,.]*', text))


@pytest.mark.parametrize(('width', 'height'), SIZES)
@pytest.mark.parametrize('name', BUILDERS)
def test_screen_has_the_size_of_the_terminal(runs, name, width, height):
    lines = screen([runs[name]], 0, width, height, keys='q quit')
    assert [line.cell_len for line in lines] == [width] * height
    assert not any('\n' in text for text in texts(lines))


@pytest.mark.parametrize('width', [*range(40, 130, 7), 150, 200])
@pytest.mark.parametrize('name', ['running', 'two_hosts', 'crashed'])
def test_no_number_is_truncated(runs, name, width):
    """Checks that all numbers of a narrow screen, except on the plot's axis, are also on the widest screen."""
    all_numbers = numbers(' '.join(texts(page(runs[name], 1000))))
    top = [
        *panels.header(runs[name], width),
        *panels.progress(runs[name], width),
        *panels.metric_fields(runs[name], width),
    ]
    lines = [
        *top,
        *panels.goodput(runs[name], width, bars=False),
        *panels.devices(runs[name], width, max_lines=20),
        *panels.events(runs[name], width, 20),
    ]
    assert all(line.cell_len <= width for line in lines)
    assert numbers(' '.join(texts(lines))) <= all_numbers
    # No number of the summary is missing.
    assert numbers(' '.join(texts(top))) == numbers(' '.join(texts(page(runs[name], 1000)[: len(top)]))) & numbers(
        ' '.join(texts(top))
    )


def test_each_row_of_small_curves_has_a_quarter_of_the_height(runs):
    lines = texts(screen([runs['running']], 0, 200, 60))
    norm, speed = (
        next(number for number, line in enumerate(lines) if title in line[:100])
        for title in ('gradient norm', 'tokens/s ')
    )
    # A blank line ends the summary.
    top = max(number for number, line in enumerate(lines[:norm]) if not line.strip()) + 1
    assert len(lines) - speed == speed - norm == (len(lines) - top) // 4


@pytest.mark.parametrize(('width', 'height'), [(80, 24), (200, 60)])
def test_contents_of_the_screen(runs, width, height):
    text = '\n'.join(texts(screen([runs['running']], 0, width, height, keys='q quit')))
    for words in (
        *('● running', 'step 234 of 400', '58.5%', 'spent 2 min 19 s', 'left 1 min 3', 'tokens 479k of 819k'),
        *('loss 2.3757', 'best 2.3757', 'validation 2.5443 at step 200', 'lr 1.05e-03', 'grad norm 0.615'),
        *('4,046 tokens/s', 'MFU 41.4%', '$0.1', 'compile', 'evaluation', 'checkpoint', 'data wait'),
        *('97%', '44.0/80.0 GiB', '61 °C', '640/700 W', '1755/1980 MHz', 'host0', 'saved', 'q quit', '◆'),
    ):
        assert words in text, words


def test_devices_have_one_line_each_on_large_screens_and_one_per_host_on_small_ones(runs):
    wide = texts(screen([runs['two_hosts']], 0, 200, 60))
    assert sum(bool(re.search(r'host\d:\d', text)) for text in wide) == 8
    assert sum('throttled: power' in text for text in wide) == 2
    narrow = texts(screen([runs['two_hosts']], 0, 80, 24))
    assert [text.rstrip() for text in narrow if ' devices ·' in text] == [
        f'host{host}: 4 devices · 1 throttled · 94–97% · 44.0/80.0 GiB · 64 °C · 2,562 W' for host in (0, 1)
    ]


def test_each_of_several_hosts_shows_its_share_of_step_time(runs):
    hosts = [text for text in texts(page(runs['two_hosts'], 120)) if text.startswith('host') and 'cpu' in text]
    assert [text.split(' · ')[1] for text in hosts] == ['in steps 80.8%', 'in steps 76.8%']
    assert not any('in steps' in text for text in texts(panels.devices(runs['running'], 120, max_lines=9)))


@pytest.mark.parametrize(
    ('name', 'words', 'style'),
    [
        ('crashed', 'RESOURCE_EXHAUSTED: out of memory', 'bold red'),
        ('killed', 'without writing a final event', 'bold red'),
        ('diverged', 'the loss is not finite', 'bold red'),
        ('preempted', 'SIGTERM', 'bold yellow'),
        ('finished', 'all steps are done', 'bold cyan'),
        ('empty', 'no run has started in this workdir', 'dim'),
    ],
)
def test_state_and_reason(runs, name, words, style):
    lines = panels.header(runs[name], 80)
    assert words in lines[1].plain
    assert style in str(lines[1].style)
    assert any(str(span.style) == style for span in lines[0].spans)


def test_long_reason_is_wrapped(tmp_path):
    scribe = workdirs.RunWriter(tmp_path)
    scribe.start()
    scribe.end('failed', 'ValueError: ' + 'a word and another one ' * 30, 1)
    lines = panels.header(dashboard_data(read_history(scribe.close()), NOW), 80)
    assert len(lines) == 1 + panels.MAX_REASON_LINES
    assert lines[-1].plain.endswith(' …')


def test_nonfinite_loss_is_shown(runs):
    text = ' '.join(texts(panels.metric_fields(runs['diverged'], 80)))
    assert 'loss not finite' in text
    assert 'skipped 40 steps' in text


def test_alerts_are_colored(runs):
    lines = panels.events(runs['diverged'], 80, 10)
    styles = {line.plain.split()[1].rstrip(':'): str(line.style) for line in lines}
    assert styles['skipped'] == 'yellow'
    assert styles['rollback'] == styles['diverged'] == 'red'
    assert styles['saved'] == ''


def test_hot_devices_and_errors_are_colored(tmp_path):
    history = read_history(workdirs.running(tmp_path))
    device = history.devices[0][-1]['devices'][0]
    device.update(temperature_c=91, ecc_errors=3, throttled=['thermal', 'power'])
    (line, _) = panels.devices(dashboard_data(history, NOW), 100, max_lines=5)
    for words in ('91 °C', 'throttled: thermal power', '3 ECC errors'):
        assert words in line.plain
    assert {'bold red', 'yellow'} <= {str(span.style) for span in line.spans}


def test_old_readings_show_their_age(tmp_path):
    history = read_history(workdirs.running(tmp_path))
    assert ' ago' not in panels.devices(dashboard_data(history, NOW), 100, max_lines=5)[-1].plain
    assert '10 min 00 s ago' in panels.devices(dashboard_data(history, NOW + 600), 100, max_lines=5)[-1].plain


def test_torn_files_are_shown(runs):
    for size in ((80, 24), (200, 60)):
        assert any('torn' in text for text in texts(screen([runs['torn']], 0, *size)))
    assert sum('skipped the incomplete last line' in text for text in texts(page(runs['torn'], 80))) == 5


def test_several_runs_are_a_table_above_the_selected_run(runs):
    two_runs = [runs['running'], runs['finished']]
    lines = texts(screen(two_runs, 1, 100, 30))
    assert lines[0].split() == ['run', 'state', 'done', 'loss', 'validation', 'left', 'cost', 'tokens/s']
    assert lines[1].split()[:3] == ['running', '●', 'running']
    assert lines[2].split()[:4] == ['▸', 'finished', '●', 'finished']
    assert lines[4].startswith('finished  ● finished')
    assert len(table(two_runs, 0, 40)[1].plain) <= 40


def test_goodput_is_readable_without_colors(runs):
    bar, *legend = texts(panels.goodput(runs['running'], 80, bars=False))
    assert len(bar) == 80
    assert legend[0].startswith('█ step 80.8%')
    shares = {letter: bar.count(letter) / 80 for letter in set(bar)}
    assert shares['█'] == pytest.approx(0.808, abs=0.02)
    assert set(bar) == {text.split()[0] for line in legend for text in line.split('  ')}


@pytest.mark.parametrize('seed', range(8))
def test_damaged_files_do_not_fail_rendering(tmp_path, seed):
    rng = random.Random(seed)
    for build in (workdirs.two_hosts, workdirs.crashed, workdirs.diverged):
        workdir = build(tmp_path / build.__name__)
        damage(workdir, rng)
        data = dashboard_data(read_history(workdir), NOW)
        for width, height in ((80, 24), (200, 60)):
            lines = screen([data, data], 0, width, height)
            assert [line.cell_len for line in lines] == [width] * height
        assert not any('\x1b' in text for text in texts(page(data, 90)))
