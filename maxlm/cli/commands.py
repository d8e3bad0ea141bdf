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
    """

    group: str
    help: str


COMMANDS = {
    'configs': Command('setup', 'list the shipped configs, or print one to edit it'),
    'prepare': Command('setup', 'filter, deduplicate, tokenize and pack text into a training dataset'),
    'questions': Command('setup', 'convert multiple-choice questions to prompts for grpo and texts for training'),
    'tokenizer': Command('setup', 'compare bytes per token of tokenizers on English, code, maths and other scripts'),
    'fetch': Command('setup', 'download files or datasets from a bucket'),
    'plan': Command('setup', 'estimate memory, time and cost of a run on any hardware'),
    'doctor': Command('setup', 'check drivers, devices, disks, buckets and data, then run two training steps'),
    'train': Command('runs', 'train a model, or resume a run'),
    'distill': Command('runs', 'store the outputs of a teacher for a dataset, to train a smaller model on them'),
    'grpo': Command('runs', 'train a model with reinforcement learning (GRPO)'),
    'recipe': Command('runs', 'run the phases of a recipe, from raw text to the exported model'),
    'monitor': Command('runs', 'watch runs in the terminal: progress, cost, loss, devices, events'),
    'report': Command('runs', 'write an HTML report of one or more runs: curves, time, cost, events, samples'),
    'supervise': Command('runs', 'restart a run after failures while it makes progress'),
    'checkpoints': Command('models', 'list, verify, prune, fetch and merge checkpoints'),
    'evaluate': Command('models', 'evaluate checkpoints: loss, benchmarks, code and long contexts'),
    'generate': Command('models', 'generate text from a checkpoint: prompts or files'),
    'chat': Command('models', 'chat with a model in the terminal'),
    'serve': Command('models', 'serve a checkpoint with an OpenAI-compatible API and a chat page'),
    'quantize': Command('models', 'quantize a checkpoint to 8 or 4 bits and compare the losses'),
    'hf': Command('models', 'import and export models in Hugging Face Transformers format'),
    'completion': Command('setup', 'print the completion script of a shell: bash, zsh or fish'),
}
# Commands that train. Their `main` also takes the start time of the process.
TRAINING = ('train', 'grpo')
# Commands that compute steps or tokens; see `maxlm.runtime.malloc.disable_malloc_trim`.
COMPUTING = (*TRAINING, 'distill', 'evaluate', 'generate', 'chat', 'serve')
# Commands that continue without their output; see `maxlm.runtime.console.survive_lost_terminal`.
WITHOUT_OUTPUT = (*TRAINING, 'distill', 'prepare', 'recipe', 'serve', 'supervise')


def module_of(name: str) -> ModuleType:
    """Imports the module of the command `maxlm NAME`."""
    return importlib.import_module(f'maxlm.cli.{COMMANDS[name].group}.{name}')
