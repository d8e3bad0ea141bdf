"""Evaluates checkpoints: `maxlm evaluate --checkpoint=runs/first [--data=DIR] [--tasks=arc_easy,needle]`.

A checkpoint is a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or the directory of one step. Several
checkpoints are compared in one table. Without --tasks, reports the loss on held-out data. With --tasks, runs lm-eval
benchmarks, task files, core:BUNDLE (the CORE metric), humaneval:FILE, mbpp:FILE, questions:FILE (exact answers) or
needle, and reports the loss only if --data is given. --export-texts writes the texts of lm-eval tasks, for
`maxlm prepare --filter decontaminate:FILE`.
"""

from __future__ import annotations

from maxlm.cli.parser import SHARED, ArgumentParser, command_parser, number
from maxlm.cli.process import run
from maxlm.errors import InputError
from maxlm.storage.paths import Kind, PathList, PathOption


def main(argv: list[str]) -> int:
    """Prints loss, perplexity, bits per byte, and the unigram entropy that a model must beat; or a table."""
    options = make_parser().parse_args(argv)
    if options.export_texts and not (options.tasks and options.export_texts.endswith('.jsonl')):
        raise InputError(f'--export-texts={options.export_texts}: needs --tasks and a name that ends in .jsonl')
    if options.export_texts:
        from maxlm.cli.execution.evaluate import export_texts

        return export_texts(options)
    if len(set(options.checkpoint)) < len(options.checkpoint):
        raise InputError('--checkpoint: the same checkpoint is given twice; remove one')

    from maxlm.cli.execution.evaluate import execute

    return execute(options)


def make_parser() -> ArgumentParser:
    parser = command_parser('evaluate', __doc__, '--checkpoint=runs/first --tasks=arc_easy')
    add = parser.add_argument
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        '--checkpoint',
        action='append',
        type=SHARED['--checkpoint']['type'],
        help=f'{SHARED["--checkpoint"]["help"]}; repeatable, others are compared with the first',
    )
    subject.add_argument(
        '--export-texts',
        type=PathOption(Kind.FILE),
        metavar='FILE',
        help='.jsonl file for the documents of the lm-eval tasks in --tasks; evaluates nothing',
    )
    parser.add_shared('--data', '--num-batches')
    add(
        '--tasks',
        type=PathList(PathOption(), remote=('core',)),
        default='',
        help='comma-separated lm-eval tasks, task files, core:BUNDLE, humaneval:FILE, mbpp:FILE, questions:FILE, '
        'needle',
    )
    folder = PathOption(Kind.DIRECTORY, may_be_empty=True)
    add('--tasks-path', type=folder, default='', help='folder of task files that --tasks can select by name')
    add('--num-fewshot', type=number(0), help='few-shot examples per lm-eval prompt (default: set by the task)')
    add('--limit', type=number(1), help='maximum documents per task')
    add('--apply-chat-template', action='store_true', help="apply the model's chat template to prompts")
    add('--samples', type=number(1), default=1, help='programs per problem; 1 = greedy (default 1)')
    add('--max-tokens', type=int, default=512, help='maximum tokens of a program or answer (default 512)')
    add('--temperature', type=float, default=0.8, help='sampling temperature if --samples > 1 (default 0.8)')
    add('--seed', type=int, default=0, help='random seed of sampling (default 0)')
    add('--num-slots', type=number(1), default=32, help='maximum concurrent continuations (default 32)')
    add('--needle-lengths', default='', help='text lengths, e.g. 1024,4096 (default: powers of two up to the context)')
    add('--needle-trials', type=number(1), default=5, help='needle trials per length and depth (default 5)')
    add('--output', type=folder, default='', help='folder for results, samples, table and figures')
    parser.add_shared('--json')
    return parser


if __name__ == '__main__':
    run('evaluate')
