"""Repeatedly kills commands that write a model or a report; started by `tests.forking` with DIR SEED KILLS NAME.

DIR contains the workdirs of tests/test_killed_conversions.py. A kill occurs at a random time. Afterwards, the output is
absent or complete, and the same command succeeds. Attempts are forked, as in `killing_training`.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from maxlm.cli.models import checkpoints, hf, quantize
from maxlm.cli.runs import report
from maxlm.errors import EXIT_DONE, exit_code

# A command imports its implementation only after it has parsed its arguments.
for name in (
    'maxlm.cli.execution.checkpoints',
    'maxlm.cli.execution.hf',
    'maxlm.cli.execution.quantize',
    'maxlm.reporting.page',
):
    importlib.import_module(name)

COMMANDS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    'merge': (checkpoints.main, ['merge', '--checkpoint=lora', '--output=output']),
    'export': (hf.main, ['export', '--checkpoint=base', '--output=output']),
    'export-adapter': (hf.main, ['export-adapter', '--checkpoint=lora', '--base=base', '--output=output']),
    'export-gguf': (hf.main, ['export-gguf', '--checkpoint=base', '--output=output']),
    'import': (hf.main, ['import', '--input=exported', '--output=output']),
    'quantize': (quantize.main, ['--checkpoint=base', '--output=output', '--format=int8', '--no-eval']),
    'report': (report.main, ['base', '--output=output']),
}


def start(name: str) -> int:
    """Forks a command and returns its process id."""
    main, arguments = COMMANDS[name]
    pid = os.fork()
    if pid == 0:
        code = exit_code(main, arguments)
        sys.stdout.flush()
        os._exit(code)
    return pid


def finish(name: str) -> dict[str, int]:
    """Runs a command to its end and returns its output."""
    code = os.waitstatus_to_exitcode(os.waitpid(start(name), 0)[1])
    assert code == EXIT_DONE, f'exit code {code}'
    return files()


def files() -> dict[str, int]:
    """Returns the sizes of the files of the output by path; {} without an output."""
    output = Path('output')
    paths = output.rglob('*') if output.is_dir() else [output] if output.exists() else []
    found = {}
    if output.is_file() and (content := output.read_bytes()).startswith(b'<!doctype html>'):
        # A report contains the time.
        return {'output': int(content.rstrip().endswith(b'</html>'))}
    for path in paths:
        # Names and compressed sizes of Orbax's data files, and metadata with times and process ids, differ.
        is_data = path.parent.name == 'd'
        is_fixed = path.is_file() and not is_data and 'METADATA' not in path.name and 'checkpoints' not in path.parts
        found[str(path.parent if is_data else path)] = path.stat().st_size if is_fixed else 0
    return found


def clean() -> None:
    """Deletes the output."""
    if Path('output').is_dir():
        shutil.rmtree('output')
    Path('output').unlink(missing_ok=True)


def main() -> int:
    """Kills a command and prints the states of its output after the kills as JSON."""
    directory, seed, kills, name = sys.argv[1:]
    os.chdir(directory)
    rng = random.Random(seed)
    began = time.monotonic()
    expected = finish(name)
    duration = time.monotonic() - began
    states: Counter[str] = Counter()
    while states.total() < int(kills):
        clean()
        pid = start(name)
        time.sleep(rng.uniform(0, duration))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = files()
        assert found in ({}, expected), (found, expected)
        hidden = any(path.name.endswith('.partial') for path in Path().iterdir())
        states['complete' if found else 'partial' if hidden else 'absent'] += 1
        if not found:
            assert finish(name) == expected
    print(json.dumps({'states': states, 'left': [path.name for path in Path().iterdir() if path.suffix == '.partial']}))
    return EXIT_DONE
