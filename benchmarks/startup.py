"""Measures the start of a run up to the end of its first step, and `--help` of all commands.

    python -m benchmarks.startup --data=DIR [--config=configs/tiny.py] [--rounds=3] [--output=FILE]

A cold start has an empty compilation cache, a warm start the cache of the cold one. The results are medians of seconds
on the clock and of CPU seconds of all threads. On a machine with other load, only the CPU seconds are comparable.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.cli.commands import COMMANDS
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.storage.paths import Kind, PathOption

SETTINGS = ('train.num_steps=1', 'train.log_every=1', 'optimizer.warmup_steps=0')
# First word of the log line of a step.
STEP = 'step'


class Seconds(NamedTuple):
    """Time of a process on the clock, and on all cores."""

    wall: float
    cpu: float


def main(argv: list[str]) -> int:
    """Prints the medians and writes them to a JSON file."""
    parser = ArgumentParser(prog='benchmarks.startup', allow_abbrev=False, description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('--data', required=True, type=PathOption(Kind.DIRECTORY), help='data set of maxlm prepare')
    parser.add_argument('--config', default='configs/tiny.py', help='with a variant after a colon')
    parser.add_argument('--rounds', type=int, default=3, help='starts of each kind (default 3)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise InputError(f'--rounds={options.rounds}: must be at least 1')
    rounds = range(options.rounds)
    starts: dict[str, list[Seconds]] = {'cold': [], 'warm': []}
    for _ in rounds:
        with tempfile.TemporaryDirectory() as directory:
            for kind, measured in starts.items():
                measured.append(first_step(options.config, options.data, Path(directory), kind))
    helps = {verb: [run('-m', f'maxlm.{verb}', '--help') for _ in rounds] for verb in COMMANDS}
    # Imported here, because benchmarks.step imports JAX.
    from benchmarks.step import machine

    result = {
        'name': 'startup',
        'config': options.config,
        'rounds': options.rounds,
        'first_step': {kind: medians(measured) for kind, measured in starts.items()},
        'help': {verb: medians(measured) for verb, measured in helps.items()},
        'machine': {**machine(), 'cores': os.cpu_count()},
    }
    for name, values in (*result['first_step'].items(), *result['help'].items()):
        print(f'{name:<12} {values["wall"]:6.2f} s  {values["cpu"]:6.2f} CPU s')
    print(json.dumps(result['machine']))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_DONE


def first_step(config: str, data: str, directory: Path, kind: str) -> Seconds:
    """Returns the time of a run from the start of its process to the log line of the first step."""
    settings = (*SETTINGS, f'data.path={data}', f'train.compilation_cache_dir={directory / "programs"}')
    words = (f'--config={config}', f'--workdir={directory / kind}', *(f'--config.{setting}' for setting in settings))
    return run('-m', 'maxlm.train', *words, until=STEP)


def run(*words: str, until: str = '') -> Seconds:
    """Runs Python until it exits, or until it prints a line with the first word `until`.

    Raises:
        InputError: the process fails, or does not print such a line.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile('w+') as errors:
        process = subprocess.Popen(
            [sys.executable, '-u', *words], stdout=subprocess.PIPE, stderr=errors, text=True, encoding='utf-8'
        )
        assert process.stdout is not None
        found = any(until and line.split()[:1] == [until] for line in process.stdout)
        wall = time.perf_counter() - start
        if found:
            process.kill()
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if not found and (until or process.returncode):
            errors.seek(0)
            raise InputError(f'{" ".join(words[:2])} exited with code {process.returncode}: {errors.read()[-500:]}')
    return Seconds(wall, usage.ru_utime + usage.ru_stime)


def medians(measured: Sequence[Seconds]) -> dict[str, Any]:
    """Returns the median of each time, rounded to milliseconds."""
    columns = zip(Seconds._fields, zip(*measured, strict=True), strict=True)
    return {name: round(statistics.median(values), 3) for name, values in columns}


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
