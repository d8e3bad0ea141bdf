"""SIGTERM before training: during imports and during setup."""

import os
import signal
import subprocess
import sys

import pytest

from maxlm.cli.execution import train as command
from maxlm.cli.runs import train
from maxlm.errors import EXIT_PREEMPTED
from maxlm.telemetry.events import read_events
from maxlm.trainer import run as runs
from tests.cli.runs.test_train import arguments
from tests.conftest import ROOT

LINE = 'SIGTERM: stopped; run the same command again to continue\n'
# Sends the signal immediately before JAX is imported.
SITE = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == 'jax':
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ('words', 'code', 'stderr'),
    [
        (['-m', 'maxlm.train', '--config=tiny', '--workdir=run'], EXIT_PREEMPTED, LINE),
        (['-m', 'maxlm.grpo', '--config=tiny', '--workdir=run'], EXIT_PREEMPTED, LINE),
        (['-m', 'maxlm', 'train', '--config=tiny', '--workdir=run'], EXIT_PREEMPTED, LINE),
        # Negative control: imports alone do not change the signal handler.
        (['-c', 'import maxlm.train, jax'], -signal.SIGTERM, ''),
    ],
    ids=['train', 'grpo', 'maxlm', 'control'],
)
def test_sigterm_while_jax_is_imported(tmp_path, words, code, stderr):
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site/sitecustomize.py').write_text(SITE)
    environment = os.environ | {'PYTHONPATH': os.pathsep.join([str(tmp_path / 'site'), str(ROOT)])}
    cwd = tmp_path / 'empty'
    cwd.mkdir()
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, '', stderr)
    assert list(cwd.iterdir()) == []


@pytest.mark.parametrize('moment', ['load', 'compile_step'])
def test_sigterm_during_setup(dataset, tmp_path, capsys, monkeypatch, moment):
    def interrupted(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            # A second signal does not interrupt the cleanup.
            os.kill(os.getpid(), signal.SIGTERM)

    workdir = tmp_path / 'run'
    monkeypatch.setattr(command if moment == 'load' else runs, moment, interrupted)
    monkeypatch.setattr(sys, 'argv', ['maxlm train', *arguments(dataset, workdir)])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as caught:
            train.run('train')
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught.value.code == EXIT_PREEMPTED
    assert capsys.readouterr().err == LINE
    if moment == 'load':
        assert not workdir.exists()
        return
    assert not (workdir / 'run.lock').exists()
    last = read_events(workdir).lines[-1]
    assert (last['kind'], last['message'], last['code']) == ('preempted', LINE.strip(), EXIT_PREEMPTED)
