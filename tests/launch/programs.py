"""Fakes of the programs that launch scripts call: a directory at the front of PATH, a plan and a record of calls."""

import functools
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import ROOT
from tests.programs import PROGRAMS

SOURCES = Path(__file__).parent / 'stand_ins'
ANSWERING = (
    *('kubectl', 'sbatch', 'srun', 'scontrol', 'squeue', 'scancel', 'enroot'),
    *('git', 'nvidia-smi', 'uv', 'pip'),
)
SECRET = 'hf_not-a-real-token-5d41402abc'
# Scripts poll once or five times a second, and this `sleep` shortens these intervals. It keeps the pauses between
# attempts, which tests set.
SLEEP = """#!/bin/sh
case "$1" in 1) set -- 0.2 ;; 0.2) set -- 0.05 ;; esac
exec {sleep} "$1"
"""


@functools.cache
def _binaries():
    """Writes the fake programs, once per process, and returns their directory."""
    folder = PROGRAMS / f'stand-ins-{os.getpid()}'
    folder.mkdir()
    # The module is compiled once, not at each start.
    py_compile.compile(shutil.copy(SOURCES / 'record.py', folder), doraise=True)
    shutil.copy(SOURCES.parent / 'skypilot.json', folder)
    sources = dict.fromkeys(ANSWERING, 'answering') | {
        **{name: name for name in ('gcloud', 'docker', 'sky', 'python')},
        'python3': 'python',
    }
    # Without site-packages and environment variables, Python starts five times as fast.
    scripts = {name: f'#!{sys.executable} -SEs\n' + (SOURCES / f'{it}.py').read_text() for name, it in sources.items()}
    scripts['sleep'] = SLEEP.format(sleep=shutil.which('sleep'))
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


class Programs:
    """Fake programs that use `folder`. The environment has a fake secret, which no call and no output may show."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / 'calls.jsonl').touch()
        self.plan()
        # Variables of the test machine must not be confused with those that a script sets.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(('MAXLM_', 'NCCL_', 'XLA_', 'JAX_', 'CUDA_', 'SLURM_')) and name != 'PYTHON'
        }
        self.environment = {
            **kept,
            # The fake Python needs it to run maxlm.supervise.
            'PYTHONPATH': str(ROOT),
            'PATH': f'{_binaries()}:{os.environ["PATH"]}',
            'STAND_INS': str(folder),
            'HF_TOKEN': SECRET,
        }

    def plan(self, *, attempts=None, replies=(), machines=None, queue=None, python_is_new=True, check_code=0):
        """Sets the behavior of the programs from now on; see `stand_ins`."""
        attempts = attempts if isinstance(attempts, dict) else {'': list(attempts or [])}
        # git reports that the directory is not a repository.
        replies = [*replies, {'match': 'git ', 'code': 128, 'times': -1}]
        plan = {'attempts': attempts, 'replies': replies, 'machines': machines, 'queue': queue}
        plan |= {'python_is_new': python_is_new, 'check_code': check_code}
        (self.folder / 'plan.json').write_text(json.dumps(plan))

    def start(self, *command, cwd=ROOT, **environment):
        """Starts a script with the fake programs."""
        # bash cannot trap SIGINT if it is ignored at its start, as in background processes.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def run(self, *command, cwd=ROOT, **environment):
        """Runs a script with the fake programs until it exits."""
        return self.finish(self.start(*command, cwd=cwd, **environment))

    def finish(self, process):
        """Waits for a started script, and checks that its output and calls do not contain the secret."""
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert SECRET not in out + err + (self.folder / 'calls.jsonl').read_text()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self, program='', **fields):
        """Returns the recorded calls of a program whose fields have these values, in order."""
        calls = [json.loads(line) for line in (self.folder / 'calls.jsonl').read_text().splitlines()]
        return [
            call
            for call in calls
            if call['program'].startswith(program) and all(call.get(name) == value for name, value in fields.items())
        ]

    def lines(self, program=''):
        """Returns the calls as command lines, without signals and readiness."""
        return [
            ' '.join([call['program'], *call['arguments']])
            for call in self.calls(program)
            if not {'signal', 'ready'} & set(call)
        ]

    def forget(self):
        """Deletes the recorded calls."""
        (self.folder / 'calls.jsonl').write_text('')

    def wait_for(self, number, program='python', **fields):
        """Waits for `number` calls and returns them."""
        for _ in range(1500):
            found = self.calls(program, **fields)
            if len(found) >= number:
                return found
            time.sleep(0.02)
        raise AssertionError(f'timed out waiting for {number} calls of {program} with {fields}: {self.calls()}')
