"""Runs the commands `maxlm VERB …` and `python -m maxlm VERB …`, which equal `python -m maxlm.VERB …`."""

from __future__ import annotations

import difflib
import importlib
import sys

from maxlm.errors import EXIT_BAD_INPUT, exit_on_sigterm

VERBS = {
    'prepare': 'text → tokens → records that training reads',
    'fetch': 'files and prepared data sets from a bucket to a local directory',
    'plan': 'memory, time and cost of a run on hardware that is not here; what fits; scaling',
    'doctor': 'whether this machine can do what a run will ask of it, before money is spent',
    'train': 'train a model, or go on with a run',
    'grpo': 'reinforcement: a model learns from those of its answers that are judged better',
    'monitor': 'watch runs on the terminal: progress, cost, loss, devices, events',
    'report': 'one page about a run, or several compared: curves, time, cost, events, samples',
    'supervise': 'start a training again, whatever ends it, as long as it gets ahead',
    'checkpoints': 'list, verify, prune and fetch the checkpoints of runs',
    'evaluate': 'loss, benchmarks, programs and long contexts of checkpoints, in one table',
    'generate': 'continue prompts with a checkpoint: from arguments, files or a terminal',
    'serve': 'an OpenAI-compatible server and a chat page on a checkpoint',
    'quantize': 'weights of a checkpoint in 8 or 4 bits, with the loss before and after',
    'hf': 'import models from, and export them to, the format of Hugging Face Transformers',
}


def main() -> None:
    """Dispatches to the module of the verb, which parses the rest of the command line."""
    name = sys.argv[1] if len(sys.argv) > 1 else ''
    if name in ('', '-h', '--help'):
        width = max(map(len, VERBS))
        print('usage: maxlm VERB [--help] …\n')
        for verb, meaning in VERBS.items():
            print(f'  {verb:<{width}}  {meaning}')
        sys.exit(0 if name else EXIT_BAD_INPUT)
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f'did you mean {near[0]!r}?' if near else f'verbs: {", ".join(VERBS)}'
        print(f'error: maxlm has no verb {name!r}; {hint}', file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    if name in ('train', 'grpo'):
        # Must precede the import, which takes seconds.
        exit_on_sigterm(importing=True)
    sys.argv = [f'maxlm {name}', *sys.argv[2:]]
    importlib.import_module(f'maxlm.{name}').run()


if __name__ == '__main__':
    main()
