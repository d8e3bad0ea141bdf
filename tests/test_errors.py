"""Error messages and log lines are one line each, whatever names and values from files contain."""

import errno
import os
import pickle

import pytest

from maxlm.errors import EXIT_BAD_INPUT, InputError, escape_controls, exit_code, one_line
from maxlm.log import RUN_LOG, Console, logger

HOSTILE = 'a\nb\r\x1b[31mred\x07\u202e\ud800\x9b\0 \u2028end'
ESCAPED = r'a b \x1b[31mred\x07\u202e\ud800\x9b\x00 end'
# pytest cannot report a log message with an unpaired surrogate to another process.
LOGGED = HOSTILE.replace('\ud800', '')


def run(error, capsys):
    def command(argv):
        raise error

    code = exit_code(command, [])
    return code, capsys.readouterr().err


def test_control_characters_are_escaped():
    assert one_line(HOSTILE) == ESCAPED
    assert one_line(ESCAPED) == ESCAPED
    assert escape_controls('grün: 1\t2\n3') == 'grün: 1\t2\n3'
    assert escape_controls('\x1b]0;title\x07') == r'\x1b]0;title\x07'


def test_messages_of_errors_are_one_line(capsys):
    error = InputError(f'{HOSTILE}: fix it')
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == f'{ESCAPED}: fix it'
    assert run(error, capsys) == (EXIT_BAD_INPUT, f'error: {ESCAPED}: fix it\n')


@pytest.mark.parametrize(
    'number', [errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EISDIR, errno.ENOTDIR], ids=errno.errorcode.get
)
def test_a_path_that_cannot_be_opened_is_one_line(capsys, number):
    code, err = run(OSError(number, os.strerror(number), 'a\nb'), capsys)
    assert code == EXIT_BAD_INPUT
    assert err == f'error: a b: {os.strerror(number)}; use another path\n'


def test_other_errors_of_the_system_are_not_hidden(capsys):
    for error in (OSError(errno.EIO, 'Input/output error', 'a'), OSError(errno.EACCES, 'no path')):
        with pytest.raises(OSError, match=error.strerror):
            run(error, capsys)


def test_log_lines_are_escaped(tmp_path, capsys):
    with Console(tmp_path):
        logger.warning(f'shard {LOGGED}')
        logger.info('two\nlines \x1b[1m')
    lines = [f'shard {ESCAPED}'.replace(r'\ud800', ''), 'two', r'lines \x1b[1m']
    assert capsys.readouterr().out.splitlines() == lines
    stored = (tmp_path / RUN_LOG).read_text().splitlines()
    assert [line.endswith(words) for line, words in zip(stored, lines, strict=True)] == [True] * 3
