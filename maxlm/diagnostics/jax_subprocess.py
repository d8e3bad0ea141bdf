"""Starts JAX in a subprocess.

Unknown XLA flags abort the process that starts JAX, and a device may never respond.
"""

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
# Prefix of the result on stdout, where libraries may print too.
RESULT_PREFIX = 'maxlm.doctor: '
PROGRAM = 'import sys; from maxlm.diagnostics.jax_subprocess import print_description; print_description(sys.argv[1])'


class JaxStart(NamedTuple):
    """Result of starting JAX.

    Attributes:
        error: reason why JAX does not start, in one line; '': it starts.
        platform: cpu, gpu or tpu.
        kinds: kinds of the devices that one process sees.
        memory: bytes of the first device that JAX may use; None if the device does not report it.
        cache_dir: directory of the compilation cache; '': none.
        cache_warning: warning of the compilation cache, in one line.
        seconds: duration, including that of the process.
    """

    error: str = ''
    platform: str = ''
    kinds: tuple[str, ...] = ()
    memory: int | None = None
    cache_dir: str = ''
    cache_warning: str = ''
    seconds: float = 0.0


def start_jax(compile_cache: str, environment: Mapping[str, str], *, seconds: float = START_SECONDS) -> JaxStart:
    """Starts JAX and its compilation cache as a run does.

    Args:
        compile_cache: train.compilation_cache_dir.
        environment: environment variables of the process.
        seconds: timeout.
    """
    command = [sys.executable, '-c', PROGRAM, compile_cache]
    # Each process on a machine starts its own subprocess, so none may preallocate all memory.
    variables = {**with_package(environment), 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
    began = time.monotonic()
    try:
        process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return JaxStart(f'JAX has not found its devices after {seconds:g} s')
    answers = [
        line.removeprefix(RESULT_PREFIX) for line in process.stdout.splitlines() if line.startswith(RESULT_PREFIX)
    ]
    if process.returncode or not answers:
        return JaxStart(exit_reason(process.stderr, process.returncode))
    fields = json.loads(answers[-1])
    return JaxStart(**{**fields, 'kinds': tuple(fields['kinds']), 'seconds': time.monotonic() - began})


def disable_accelerator_search(start: JaxStart) -> None:
    """Prevents JAX in this process from searching again for absent accelerators, which can take minutes."""
    if start.platform == 'cpu':
        import jax

        jax.config.update('jax_platforms', 'cpu')


def print_description(compile_cache: str) -> None:
    """Entry point of the subprocess: prints the result of `describe_jax`."""
    print(f'{RESULT_PREFIX}{json.dumps(describe_jax(compile_cache))}')


def describe_jax(compile_cache: str) -> dict[str, Any]:
    """Returns the fields of `JaxStart` that JAX determines, for this process."""
    import jax

    from maxlm.runtime.compilation_cache import enable_compilation_cache

    collector = _WarningCollector()
    log = logging.getLogger('maxlm')
    log.addHandler(collector)
    try:
        enable_compilation_cache(compile_cache)
    except InputError as error:
        collector.lines.append(str(error))
    finally:
        log.removeHandler(collector)
    devices = jax.devices()
    settings: Any = jax.config
    return {
        'platform': jax.default_backend(),
        'kinds': [device.device_kind for device in devices],
        'memory': (devices[0].memory_stats() or {}).get('bytes_limit'),
        'cache_dir': settings.jax_compilation_cache_dir or '',
        'cache_warning': '; '.join(collector.lines),
    }


class _WarningCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(' '.join(record.getMessage().split()))


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that make another process import this package, even if it is not installed."""
    root = str(Path(maxlm.__file__).parent.parent)
    paths = [root, *filter(None, environment.get('PYTHONPATH', '').split(os.pathsep))]
    return {**environment, 'PYTHONPATH': os.pathsep.join(dict.fromkeys(paths))}


def exit_reason(stderr: str, code: int) -> str:
    """Returns why a process exited, in one line, from the end of its output."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for line in lines:
        # XLA prints this line above a stack trace when it aborts.
        if 'Unknown flag' in line:
            return line[line.index('Unknown flag') :][:300]
    exit_text = f'signal {-code}' if code < 0 else f'exit code {code}'
    messages = [line for line in lines if not line.startswith(('@', '*', 'File ', 'For simplicity'))]
    errors = [line for line in messages if 'Error' in line or line.startswith(('error:', 'F0', 'F1'))]
    reason = (errors or messages or [''])[-1].removeprefix('error: ')
    return ' '.join(reason.split())[:300] or f'it exited with {exit_text} and no message'
