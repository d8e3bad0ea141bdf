"""Runs the commands `maxlm VERB …` and `python -m maxlm VERB …`, which equal `python -m maxlm.VERB …`."""

from __future__ import annotations

import difflib
import importlib
import sys

from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, run_command

VERBS = {
    'configs': 'list the shipped configs, or print one to edit it',
    'prepare': 'filter, deduplicate, tokenize and pack text into a training dataset',
    'fetch': 'download files or datasets from a bucket',
    'plan': 'estimate memory, time and cost of a run on any hardware',
    'doctor': 'check drivers, devices, disks, buckets and data, then run two training steps',
    'train': 'train a model, or resume a run',
    'distill': 'store the outputs of a teacher for a dataset, to train a smaller model on them',
    'grpo': 'train a model with reinforcement learning (GRPO)',
    'recipe': 'run the phases of a recipe, from raw text to the exported model',
    'monitor': 'watch runs in the terminal: progress, cost, loss, devices, events',
    'report': 'write an HTML report of one or more runs: curves, time, cost, events, samples',
    'supervise': 'restart a run after failures while it makes progress',
    'checkpoints': 'list, verify, prune, fetch and merge checkpoints',
    'evaluate': 'evaluate checkpoints: loss, benchmarks, code and long contexts',
    'generate': 'generate text from a checkpoint: prompts, files or a chat',
    'serve': 'serve a checkpoint with an OpenAI-compatible API and a chat page',
    'quantize': 'quantize a checkpoint to 8 or 4 bits and compare the losses',
    'hf': 'import and export models in Hugging Face Transformers format',
    'completion': 'print the completion script of a shell: bash, zsh or fish',
}


def _usage(argv: list[str]) -> int:
    width = max(map(len, VERBS))
    print('usage: maxlm COMMAND [--help] …\n')
    for verb, meaning in VERBS.items():
        print(f'  {verb:<{width}}  {meaning}')
    return EXIT_DONE if argv else EXIT_BAD_INPUT


def main() -> None:
    """Dispatches to the module of the verb, which parses the rest of the command line."""
    name = sys.argv[1] if len(sys.argv) > 1 else ''
    if name in ('', '-h', '--help'):
        sys.exit(run_command(_usage))
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f'did you mean {near[0]!r}?' if near else f'available: {", ".join(VERBS)}'
        print(f'error: unknown command {name!r}; {hint}', file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    sys.argv = [f'maxlm {name}', *sys.argv[2:]]
    importlib.import_module(f'maxlm.{name}').run()


if __name__ == '__main__':
    main()
