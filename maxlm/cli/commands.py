"""Table of the commands `maxlm NAME`."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple


class Command(NamedTuple):
    """A command of maxlm. Its module defines `make_parser()` and `main(argv)`, which returns the exit code.

    Attributes:
        group: package of its module in `maxlm.cli`.
        help: one line for `maxlm --help`.
        output_is_optional: it continues without its output; see `maxlm.runtime.console.survive_lost_terminal`.
        computes: it computes steps or tokens; see `maxlm.runtime.malloc.disable_malloc_trim`.
        trains: it trains, and `main` takes the start time of its process.
    """

    group: str
    help: str
    output_is_optional: bool = False
    computes: bool = False
    trains: bool = False


COMMANDS = {
    'configs': Command('setup', 'list the shipped configs, or print one to edit it'),
    'prepare': Command(
        'setup', 'filter, deduplicate, tokenize and pack text into a training dataset', output_is_optional=True
    ),
    'fetch': Command('setup', 'download files or datasets from a bucket'),
    'plan': Command('setup', 'estimate memory, time and cost of a run on any hardware'),
    'doctor': Command('setup', 'check drivers, devices, disks, buckets and data, then run two training steps'),
    'train': Command('runs', 'train a model, or resume a run', output_is_optional=True, computes=True, trains=True),
    'distill': Command(
        'runs',
        'store the outputs of a teacher for a dataset, to train a smaller model on them',
        output_is_optional=True,
        computes=True,
    ),
    'grpo': Command(
        'runs',
        'train a model with reinforcement learning (GRPO)',
        output_is_optional=True,
        computes=True,
        trains=True,
    ),
    'recipe': Command(
        'runs', 'run the phases of a recipe, from raw text to the exported model', output_is_optional=True
    ),
    'monitor': Command('runs', 'watch runs in the terminal: progress, cost, loss, devices, events'),
    'report': Command('runs', 'write an HTML report of one or more runs: curves, time, cost, events, samples'),
    'supervise': Command('runs', 'restart a run after failures while it makes progress', output_is_optional=True),
    'checkpoints': Command('models', 'list, verify, prune, fetch and merge checkpoints'),
    'evaluate': Command('models', 'evaluate checkpoints: loss, benchmarks, code and long contexts', computes=True),
    'generate': Command('models', 'generate text from a checkpoint: prompts, files or a chat', computes=True),
    'serve': Command(
        'models',
        'serve a checkpoint with an OpenAI-compatible API and a chat page',
        output_is_optional=True,
        computes=True,
    ),
    'quantize': Command('models', 'quantize a checkpoint to 8 or 4 bits and compare the losses'),
    'hf': Command('models', 'import and export models in Hugging Face Transformers format'),
    'completion': Command('setup', 'print the completion script of a shell: bash, zsh or fish'),
}


def module_of(name: str) -> ModuleType:
    """Imports the module of the command `maxlm NAME`."""
    return importlib.import_module(f'maxlm.cli.{COMMANDS[name].group}.{name}')
