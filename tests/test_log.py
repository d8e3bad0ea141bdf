"""Console output: progress as a bar on terminals and as lines elsewhere, and log lines on stdout and in run.log."""

import io
import sys

import pytest

from maxlm import log
from maxlm.errors import InputError
from maxlm.log import BYTES, RUN_LOG, Console, ProgressLines, logger, progress_bar
from tests.clock import Clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def draw(monkeypatch, stream, *, show):
    monkeypatch.setattr(sys, 'stderr', stream)
    with progress_bar('train', total=10, initial=3, unit='step', show=show, lines=False) as bar:
        for _ in range(7):
            bar.update()
        bar.refresh()
    return stream.getvalue()


def test_the_progress_bar_needs_a_terminal(monkeypatch):
    assert draw(monkeypatch, io.StringIO(), show=True) == ''
    assert draw(monkeypatch, Terminal(), show=False) == ''
    shown = draw(monkeypatch, Terminal(), show=True)
    assert '10/10' in shown
    assert '3/10' in shown


@pytest.fixture
def follow(monkeypatch):
    """Returns a function that updates progress lines, which tests/conftest.py turns off."""
    monkeypatch.setattr(log, 'LINE_SECONDS', 10.0)
    return _follow


def _follow(total, steps, **options):
    # Each step has a duration in seconds and an amount of work.
    clock = Clock()
    with ProgressLines('work', total=total, clock=clock, **options) as bar:
        for seconds, amount in steps:
            clock.now += seconds
            bar.update(amount)


def test_without_a_terminal_progress_is_a_line_every_ten_seconds(follow, capsys):
    follow(60, [(1, 1)] * 25, unit='batch')
    assert capsys.readouterr().err.splitlines() == [
        'work: 10 of 60 batches (16%), 1 batches/s, 50.0 s left',
        'work: 20 of 60 batches (33%), 1 batches/s, 40.0 s left',
        'work: 25 batches in 25.0 s',
    ]
    # Control: work that takes less than the interval is silent.
    follow(60, [(1, 1)] * 9, unit='batch')
    assert capsys.readouterr() == ('', '')


def test_lines_have_sizes_slow_rates_and_no_unknown_values(follow, capsys):
    follow(4 * 2**20, [(10, 2**20)], initial=2**20, unit=BYTES)
    follow(3, [(20, 1)], unit='tensor')
    follow(0, [(10, 5)], unit='step')
    follow(4, [(10, 0)], unit='step')
    assert capsys.readouterr().err.splitlines()[::2] == [
        'work: 2.00 MiB of 4.00 MiB (50%), 104.9 kB/s, 20.0 s left',
        'work: 1 of 3 tensors (33%), 20.0 s per tensor, 40.0 s left',
        'work: 5 steps, 2.00 s per step',
        'work: 0 of 4 steps (0%), 0 steps/s',
    ]


def test_only_shown_progress_without_a_terminal_prints_lines(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    assert isinstance(progress_bar('work', total=1, unit='step', show=True), ProgressLines)
    assert progress_bar('work', total=1, unit='step', show=False).disable
    monkeypatch.setattr(sys, 'stderr', Terminal())
    assert not isinstance(progress_bar('work', total=1, unit='step', show=True), ProgressLines)


def test_lines_go_to_stdout_and_into_the_log(tmp_path, capsys):
    with Console(tmp_path):
        logger.info('first line')
        logger.warning('take care')
        logger.debug('not shown')
    logger.info('after the run')
    with Console(tmp_path):
        logger.info('second attempt')
    out, err = capsys.readouterr()
    assert out.splitlines() == ['first line', 'take care', 'second attempt']
    assert err == ''
    lines = (tmp_path / 'run.log').read_text().splitlines()
    assert [line.split(' ', 2)[2] for line in lines] == [
        'INFO first line',
        'WARNING take care',
        'INFO second attempt',
    ]


def test_without_a_workdir_there_is_no_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Console():
        logger.info('hello')
    assert capsys.readouterr().out == 'hello\n'
    assert list(tmp_path.iterdir()) == []


def test_handlers_are_removed_after_an_error(tmp_path):
    before = list(logger.handlers)
    with pytest.raises(RuntimeError), Console(tmp_path):
        raise RuntimeError
    assert logger.handlers == before


def test_a_disk_that_is_full_is_reported_once(tmp_path, capsys):
    (tmp_path / RUN_LOG).symlink_to('/dev/full')
    with Console(tmp_path):
        logger.info('first line')
        logger.info('second line')
    out, err = capsys.readouterr()
    assert out.splitlines() == ['first line', 'second line']
    assert err == f'{tmp_path}/{RUN_LOG}: No space left on device; lines are missing in it\n'


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / RUN_LOG).mkdir()
    with pytest.raises(InputError, match=f'{RUN_LOG}: Is a directory'):
        Console(tmp_path)
