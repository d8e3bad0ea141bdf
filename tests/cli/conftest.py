"""Runs commands in this process."""

import pytest

from maxlm.errors import exit_code


@pytest.fixture
def run_command(capfd):
    """Returns a function that runs a command and returns exit code, stdout and stderr."""

    def run_command(main, *words):
        capfd.readouterr()
        code = exit_code(main, [str(word) for word in words])
        return (code, *capfd.readouterr())

    return run_command
