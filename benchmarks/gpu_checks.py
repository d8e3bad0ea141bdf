"""Checks that runs of a config are equal bit for bit: two new ones, and one that is killed and resumed.

    python -m benchmarks.gpu_checks --config=configs/1b.py [--config.section.key=value …] [--checks=NAME,…]
        [--output=FILE]

deterministic: two runs in separate processes. resume: a run that is killed with SIGKILL after a checkpoint, and resumed
in a new process. The losses and gradient norms of all steps, and the checksums of the final state, must equal those of
an uninterrupted run. The exit code is 1 if they differ.

train.deterministic is true unless it is overridden: with --config.train.deterministic=false, the checks show whether
the device needs it. By default, a small loop runs the step and the checkpoints of maxlm on the text of this repository,
and needs only jax, flax, optax, orbax and ml_collections. With --through-train the runs are those of `maxlm train`,
which needs all packages and prepared data (--config.data.path).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from benchmarks.step import machine, repository_text, resolve_here
from benchmarks.text_steps import text_batch
from maxlm.checkpoint.checksums import read_checksums
from maxlm.checkpoint.manager import Checkpoints, saved_steps
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.parallel.layout import make_layout
from maxlm.storage.jsonl import JsonlWriter, read_lines
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state, init_state

ROOT = Path(__file__).parent.parent
CHECKS = ('deterministic', 'resume')
# Metrics of each step that are compared.
COMPARED = ('train/loss', 'train/grad_norm')
# File names of `maxlm train`, and of facts that only the process with the devices knows.
METRICS, FACTS = 'metrics.jsonl', 'machine.json'
# Items of the final checkpoint that are compared.
STATE = frozenset({'params', 'optimizer'})
# A killed run has completed this number of steps after its checkpoint.
STEPS_AFTER_SAVE = 3
# Number of steps of a run that is killed before it ends.
ENDLESS = 10**9
# Number of differences in the result.
LISTED = 5
POLL_SECONDS = 0.05
_WORDS = ('true', 'false')


class Settings(NamedTuple):
    """Settings that all runs have in common.

    Attributes:
        config: config file, with a variant after a colon.
        overrides: overrides of the config.
        steps: number of steps of a complete run.
        save_step: step with the checkpoint from which the killed run resumes.
        through_train: run `maxlm train` instead of the loop of this module.
    """

    config: str
    overrides: list[str]
    steps: int
    save_step: int
    through_train: bool

    def command(self, workdir: Path, *, steps: int) -> list[str]:
        """Returns the command of a run that ends after `steps` steps. The learning rates do not depend on `steps`."""
        common = [f'--config={self.config}', *(f'--config.{override}' for override in self.overrides)]
        if not self.through_train:
            own = [f'--run={workdir}', f'--steps={steps}', f'--save-step={self.save_step}']
            return [sys.executable, '-m', 'benchmarks.gpu_checks', *common, *own]
        settings = {
            'train.num_steps': self.steps,
            'train.log_every': 1,
            # Otherwise, a later run would execute the program that an earlier run has compiled.
            'train.compilation_cache_dir': '',
            'checkpoint.save_interval_steps': self.save_step,
            'checkpoint.save_interval_minutes': 0,
        }
        words = [*common, *(f'--config.{key}={value}' for key, value in settings.items())]
        return [sys.executable, '-m', 'maxlm.train', *words, f'--workdir={workdir}']


def main(argv: list[str]) -> int:
    """Runs the checks, or with --run one of their runs."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.gpu_checks', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file, with a variant after a colon')
    parser.add_argument('--checks', default=','.join(CHECKS), help=f'checks, separated by commas (default {CHECKS})')
    parser.add_argument('--steps', type=int, default=50, help='steps of a run (default 50)')
    parser.add_argument('--save-step', type=int, help='step of the checkpoint (default: half of the steps)')
    parser.add_argument('--through-train', action='store_true', help='run maxlm train')
    parser.add_argument('--workdir', type=Path, help='directory for the runs (default: a temporary directory)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    parser.add_argument('--run', type=Path, help='used by the checks: run the steps in this workdir')
    options = parser.parse_args(rest)
    save_step = options.save_step or options.steps // 2
    if not 1 <= save_step < options.steps:
        raise InputError(f'--save-step={save_step}: must be at least 1 and below --steps={options.steps}')
    overrides = ['train.deterministic=true', *overrides]
    if options.run:
        run_steps(resolve_here(options.config, overrides), options.run, steps=options.steps, save_step=save_step)
        return EXIT_DONE
    names = options.checks.split(',')
    if unknown := set(names) - set(CHECKS):
        raise InputError(f'--checks={options.checks}: {", ".join(sorted(unknown))} does not exist; use {CHECKS}')
    settings = Settings(options.config, overrides, options.steps, save_step, options.through_train)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.workdir or Path(temporary)
        result = {'config': options.config, 'overrides': overrides, **run_checks(settings, names, directory)}
    for name, check in result['checks'].items():
        outcome = 'equal bit for bit' if check['equal'] else f'DIFFERENT: {check["differences"] or "the final state"}'
        print(f'{name}: {check["steps"]} steps, {outcome}')
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_DONE if all(check['equal'] for check in result['checks'].values()) else EXIT_FAILED


def run_checks(settings: Settings, names: Sequence[str], directory: Path) -> dict[str, Any]:
    """Runs the checks in new workdirs and returns their results, the losses and the machine."""
    reference = directory / 'uninterrupted'
    if directory.is_dir() and any(directory.iterdir()):
        raise InputError(f'--workdir={directory}: contains other files; give a new or empty directory')
    _run(settings, reference)
    found: dict[str, Any] = {}
    if 'deterministic' in names:
        _run(settings, directory / 'again')
        found['deterministic'] = compare(reference, directory / 'again', steps=settings.steps)
    if 'resume' in names:
        killed_after = _kill(settings, directory / 'killed')
        _run(settings, directory / 'killed')
        compared = compare(reference, directory / 'killed', steps=settings.steps)
        found['resume'] = {**compared, 'saved': settings.save_step, 'killed_after': killed_after}
    facts = json.loads((reference / FACTS).read_text()) if (reference / FACTS).is_file() else {}
    losses = [line[COMPARED[0]] for line in _metrics(reference)]
    return {'checks': found, 'losses': losses, **facts}


def compare(reference: Path, workdir: Path, *, steps: int) -> dict[str, Any]:
    """Compares the bits of each step of a run, also of repeated steps, and its final state, with those of another run.

    Args:
        reference: workdir of an uninterrupted run.
        workdir: workdir of the other run.
        steps: number of steps that both runs must have.
    """
    expected = {line['step']: line for line in _metrics(reference)}
    lines = _metrics(workdir)
    differences = [
        {'step': line['step'], 'name': name, 'expected': expected[line['step']][name], 'found': line[name]}
        for line in lines
        if line['step'] <= steps
        for name in COMPARED
        # The text of a float has all of its bits. Numbers that are not finite are null.
        if line[name] != expected[line['step']][name]
    ]
    wanted = set(range(1, steps + 1))
    is_complete = wanted <= expected.keys() and wanted <= {line['step'] for line in lines}
    states = [read_checksums(epath.Path(each) / 'checkpoints' / str(steps)) or {} for each in (reference, workdir)]
    has_same_state = all(sums.keys() >= STATE for sums in states) and all(states[0][x] == states[1][x] for x in STATE)
    return {
        'equal': not differences and is_complete and has_same_state,
        'steps': steps,
        'compared': sum(line['step'] <= steps for line in lines),
        'differences': differences[:LISTED],
        'same_final_state': has_same_state,
    }


def run_steps(config: Config, workdir: Path, *, steps: int, save_step: int) -> None:
    """Runs the steps after the newest checkpoint of a workdir, and appends the metrics of each to its file.

    Args:
        config: resolved config.
        workdir: directory, created if it is missing.
        steps: number of the last step.
        save_step: step after which a checkpoint is saved, as after the last one.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    layout = make_layout(config.mesh)
    abstract = abstract_state(config, layout)
    compiled = compile_train_step(config, layout, abstract)
    facts = {'machine': machine(), 'attention': config.model.attention, 'compile_seconds': compiled.seconds}
    program = compiled.step.as_text() or ''
    # XLA sets this field in the calls of cuDNN's attention, if a GPU is present when it compiles.
    facts |= {f'force_deterministic_{word}': program.count(f'"force_deterministic":{word}') for word in _WORDS}
    (workdir / FACTS).write_text(json.dumps(facts))
    text = repository_text()
    writer = JsonlWriter(workdir / METRICS)
    with Checkpoints(workdir, max_to_keep=2) as checkpoints:
        restored = checkpoints.restore_newest(abstract, loss_scale=config.train.initial_loss_scale)
        state = restored.state if restored else init_state(config, layout)
        for number in range(int(state.step) + 1, steps + 1):
            batch = layout.put_batch(make_batch(config, text, number), config.train.global_batch_size)
            state, metrics = compiled.step(state, batch)
            values = {name: float(metrics[name.removeprefix('train/')]) for name in COMPARED}
            writer.write({'step': number, **values})
            if number in (save_step, steps):
                checkpoints.save(number, state, {})


def make_batch(config: Config, text: np.ndarray, step: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step, which depends only on the seed and the step."""
    return text_batch(np.random.default_rng((config.data.seed, step)), text, config)


def _run(settings: Settings, workdir: Path) -> None:
    """Runs a complete run, or the rest of a killed one."""
    done = subprocess.run(settings.command(workdir, steps=settings.steps), cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise InputError(f'{workdir.name}: the run ended with exit code {done.returncode}; see its error above')


def _kill(settings: Settings, workdir: Path) -> int:
    """Kills a run `STEPS_AFTER_SAVE` steps after its checkpoint. Returns the number of completed steps."""
    command = settings.command(workdir, steps=ENDLESS)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wanted = settings.save_step + STEPS_AFTER_SAVE
        while settings.save_step not in _saved(workdir) or _completed(workdir) < wanted:
            if process.poll() is not None:
                raise InputError(
                    f'{workdir.name}: the run ended with exit code {process.returncode} before it could be killed; '
                    'increase --steps'
                )
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    return _completed(workdir)


def _saved(workdir: Path) -> list[int]:
    return saved_steps(workdir) if workdir.is_dir() else []


def _completed(workdir: Path) -> int:
    return max((line['step'] for line in _metrics(workdir)), default=0)


def _metrics(workdir: Path) -> list[Mapping[str, Any]]:
    """Returns the lines of training steps. The last line of a killed run may be incomplete."""
    return [line for line in read_lines(workdir / METRICS).lines if COMPARED[0] in line]


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
