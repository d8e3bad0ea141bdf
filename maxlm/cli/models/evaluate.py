"""Evaluates checkpoints: `python -m maxlm.evaluate --checkpoint=runs/first [--data=DIR] [--tasks=arc_easy,needle]`.

A checkpoint is a workdir (its newest step), `WORKDIR@STEP`, or the directory of one step. Several checkpoints are
compared in one table. Without --tasks, reports the loss on held-out data. With --tasks, runs lm-eval benchmarks, task
files, core:DIRECTORY (the CORE metric), humaneval:FILE, mbpp:FILE or needle, and reports the loss only if --data is
given. --export-texts writes the texts of lm-eval tasks, for `maxlm prepare --filter decontaminate:FILE`.
"""

from __future__ import annotations

import argparse
import sys

from maxlm.errors import ArgumentParser, InputError, flag, run_command
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.storage.paths import ANY, Kind, PathList, PathOption


def main(argv: list[str]) -> int:
    """Prints loss, perplexity, bits per byte, and the unigram entropy that a model must beat; or a table."""
    options = _parse(argv)
    if options.export_texts:
        from maxlm.commands.evaluate import export_texts

        return export_texts(options)
    if len(set(options.checkpoint)) < len(options.checkpoint):
        raise InputError('--checkpoint: the same checkpoint is given twice; remove one')

    from maxlm.commands.evaluate import execute

    return execute(options)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog='maxlm evaluate',
        allow_abbrev=False,
        description=__doc__,
        epilog='example: python -m maxlm.evaluate --checkpoint=runs/first --tasks=arc_easy',
    )
    add = parser.add_argument
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        '--checkpoint',
        action='append',
        type=PathOption(Kind.DIRECTORY, ANY),
        help='workdir, WORKDIR@STEP or directory of one step; repeatable, others are compared with the first',
    )
    subject.add_argument(
        '--export-texts',
        type=PathOption(Kind.FILE),
        metavar='FILE',
        help='.jsonl file for the documents of the lm-eval tasks in --tasks; evaluates nothing',
    )
    add('--data', type=PathOption(Kind.DIRECTORY, ANY), help="data set of maxlm.prepare (default: the run's)")
    add('--num-batches', type=int, default=0, help='number of validation batches; 0 = all (default)')
    add(
        '--tasks',
        type=PathList(PathOption()),
        default='',
        help='comma-separated lm-eval tasks, task files, core:DIRECTORY, humaneval:FILE, mbpp:FILE, needle',
    )
    folder = PathOption(Kind.DIRECTORY, may_be_empty=True)
    add('--tasks-path', type=folder, default='', help='folder of task files that --tasks can select by name')
    add('--num-fewshot', type=int, help='few-shot examples per lm-eval prompt (default: set by the task)')
    add('--limit', type=int, help='maximum documents per task')
    add('--apply-chat-template', action='store_true', help="apply the model's chat template to prompts")
    add('--samples', type=int, default=1, help='programs per problem; 1 = greedy (default 1)')
    add('--max-tokens', type=int, default=512, help='maximum tokens of a program (default 512)')
    add('--temperature', type=float, default=0.8, help='sampling temperature if --samples > 1 (default 0.8)')
    add('--seed', type=int, default=0, help='random seed of sampling (default 0)')
    add('--num-slots', type=int, default=32, help='maximum concurrent continuations (default 32)')
    add('--needle-lengths', default='', help='text lengths, e.g. 1024,4096 (default: powers of two up to the context)')
    add('--needle-trials', type=int, default=5, help='needle trials per length and depth (default 5)')
    add('--output', type=folder, default='', help='folder for results, samples, table and figures')
    add('--json', action='store_true', help='print one JSON object')
    options = parser.parse_args(argv)
    if options.export_texts and not (options.tasks and options.export_texts.endswith('.jsonl')):
        raise InputError(f'--export-texts={options.export_texts}: needs --tasks and a name that ends in .jsonl')
    if options.num_batches < 0:
        raise InputError(f'--num-batches={options.num_batches}: must be at least 0 (0 = all)')
    for name, least in {'limit': 1, 'num_fewshot': 0, 'samples': 1, 'needle_trials': 1, 'num_slots': 1}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f'{flag(name)}={value}: must be at least {least}')
    return options


def run() -> None:
    """Entry point of `python -m maxlm.evaluate` and `maxlm evaluate`."""
    disable_malloc_trim()
    sys.exit(run_command(main))


if __name__ == '__main__':
    run()
