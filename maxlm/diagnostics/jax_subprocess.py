"""JAX started in a process of its own: flags that it does not know end that process, and a device may never answer."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import maxlm
from maxlm.errors import InputError

START_SECONDS = 180.0
# Before the answer on stdout, where libraries may print too.
MARK = 'maxlm.doctor: '
PROGRAM = 'import sys; from maxlm.diagnostics.jax_subprocess import answer; answer(sys.argv[1])'


class Start(NamedTuple):
    """How JAX starts.

    Attributes:
        trouble: why it does not, in one line; '' = it does.
        platform: cpu, gpu or tpu.
        kinds: of the devices that one process sees.
        memory: bytes of the first device that JAX may use; None if it does not tell.
        programs: directory where compiled programs are kept; '' = nowhere.
        complaint: what keeping programs complains of, in one line.
        seconds: that it took, the process included.
    """

    trouble: str = ''
    platform: str = ''
    kinds: tuple[str, ...] = ()
    memory: int | None = None
    programs: str = ''
    complaint: str = ''
    seconds: float = 0.0


def start_jax(compile_cache: str, environment: Mapping[str, str], *, seconds: float = START_SECONDS) -> Start:
    """Starts JAX as a run would, and keeps compiled programs as it would.

    Args:
        compile_cache: train.compilation_cache_dir.
        environment: variables of the process.
        seconds: after which it is ended.
    """
    command = [sys.executable, '-c', PROGRAM, compile_cache]
    # Of several processes on a machine each has its own probe: one that takes all memory would take it from the others.
    variables = {**with_package(environment), 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Start(f'JAX has not found its devices after {seconds:g} s')
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        return Start(reason_of(done.stderr, done.returncode))
    told = json.loads(answers[-1])
    return Start(**{**told, 'kinds': tuple(told['kinds']), 'seconds': time.monotonic() - began})


def settle(start: Start) -> None:
    """Has JAX in this process not look again for accelerators that are not here, which can take minutes."""
    if start.platform == 'cpu':
        import jax

        jax.config.update('jax_platforms', 'cpu')


def answer(compile_cache: str) -> None:
    """What the process does: prints what `describe_jax` returns."""
    print(f'{MARK}{json.dumps(describe_jax(compile_cache))}')


def describe_jax(compile_cache: str) -> dict[str, Any]:
    """The fields of `Start` that JAX knows, of this process."""
    import jax

    from maxlm.runtime.compilation_cache import enable_compilation_cache

    complaints = _Complaints()
    log = logging.getLogger('maxlm')
    log.addHandler(complaints)
    try:
        enable_compilation_cache(compile_cache)
    except InputError as error:
        complaints.lines.append(str(error))
    finally:
        log.removeHandler(complaints)
    devices = jax.devices()
    settings: Any = jax.config
    return {
        'platform': jax.default_backend(),
        'kinds': [device.device_kind for device in devices],
        'memory': (devices[0].memory_stats() or {}).get('bytes_limit'),
        'programs': settings.jax_compilation_cache_dir or '',
        'complaint': '; '.join(complaints.lines),
    }


class _Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(' '.join(record.getMessage().split()))


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which another process finds this very package, whether or not it is installed."""
    root = str(Path(maxlm.__file__).parent.parent)
    paths = [root, *filter(None, environment.get('PYTHONPATH', '').split(os.pathsep))]
    return {**environment, 'PYTHONPATH': os.pathsep.join(dict.fromkeys(paths))}


def reason_of(stderr: str, code: int) -> str:
    """Why a process ended, in one line, from the end of what it said."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for line in lines:
        # An abort with a stack below; the line is XLA's.
        if 'Unknown flag' in line:
            return line[line.index('Unknown flag') :][:300]
    ending = f'signal {-code}' if code < 0 else f'exit code {code}'
    told = [line for line in lines if not line.startswith(('@', '*', 'File ', 'For simplicity'))]
    errors = [line for line in told if 'Error' in line or line.startswith(('error:', 'F0', 'F1'))]
    reason = (errors or told or [''])[-1].removeprefix('error: ')
    return ' '.join(reason.split())[:300] or f'it ended with {ending} and no word'
