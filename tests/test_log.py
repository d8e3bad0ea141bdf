"""Console output: progress bars only on terminals, and log lines on stdout and in run.log."""

import io
import sys

import pytest

from maxlm.errors import InputError
from maxlm.log import RUN_LOG, Console, logger, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def draw(monkeypatch, stream, *, show):
    monkeypatch.setattr(sys, 'stderr', stream)
    with progress_bar(total=10, initial=3, unit='step', show=show) as bar:
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
