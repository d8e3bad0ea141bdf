"""Generates text from prompts: `maxlm generate --checkpoint=runs/first --prompt='Once upon'`.

The checkpoint is a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or the directory of one step. Prompts are
arguments (--prompt), files (--prompt-file), lines typed in a terminal (--interactive), or a JSONL file (--input), whose
completions are written to --output. With --chat, prompts are user messages. Runs on one device.
"""

from __future__ import annotations

import argparse

from maxlm.cli.hints import print_next
from maxlm.cli.parser import ArgumentParser, command_parser, number, text_argument
from maxlm.cli.process import run
from maxlm.errors import EXIT_DONE, InputError
from maxlm.storage.paths import Kind, PathOption


def main(argv: list[str]) -> int:
    """Prints each prompt with its completions or answers, or writes them to a file."""
    options = make_parser().parse_args(argv)
    _check(options)

    from maxlm.cli.execution.generate import execute

    execute(options)
    print_next('maxlm', 'serve', f'--checkpoint={options.checkpoint}')
    return EXIT_DONE


def make_parser() -> ArgumentParser:
    parser = command_parser('generate', __doc__, '--checkpoint=runs/first --prompt="Once upon"')
    file = PathOption(Kind.FILE, as_path=True)
    parser.add_shared('--checkpoint')
    parser.add_argument('--prompt', action='append', type=text_argument, help='text to continue; repeatable')
    parser.add_argument(
        '--prompt-file', action='append', type=file, help='file containing a text to continue; repeatable'
    )
    parser.add_argument('--interactive', action='store_true', help='read prompts from the terminal')
    parser.add_argument('--input', type=file, help='JSONL file with "prompt" or "messages" on each line')
    parser.add_argument('--output', type=file, help='JSONL file for the lines of --input with "completions"')
    parser.add_argument('--chat', action='store_true', help='treat prompts as user messages; apply the chat template')
    parser.add_argument('--suffix', type=text_argument, help='suffix for fill-in-the-middle (FIM-trained models only)')
    parser.add_argument(
        '--parse-special',
        action='store_true',
        help='encode names of special tokens in prompts as their ids, e.g. in a rendered chat; default: as text',
    )
    parser.add_argument('--max-tokens', type=int, default=128, help='maximum tokens per continuation (default 128)')
    parser.add_argument('--num-samples', type=number(1), default=1, help='continuations per prompt (default 1)')
    parser.add_shared('--temperature', '--top-k', '--top-p', '--min-p', '--repetition-penalty', '--stop', '--seed')
    parser.add_argument('--slots', type=number(1), default=8, help='maximum concurrent continuations (default 8)')
    parser.add_shared('--kv-cache-dtype', '--draft-model', '--num-draft-tokens', '--quantize')
    return parser


def _check(options: argparse.Namespace) -> None:
    """Checks combinations and ranges that argparse does not check."""
    sources = [
        name
        for name, there in {
            '--prompt': options.prompt is not None or options.prompt_file is not None,
            '--interactive': options.interactive,
            '--input': options.input is not None,
        }.items()
        if there
    ]
    if len(sources) != 1:
        raise InputError(
            'prompts must be given in exactly one way: --prompt and --prompt-file, --interactive, or --input; '
            f'given: {", ".join(sources) or "none"}'
        )
    if (options.input is None) != (options.output is None):
        raise InputError('--input and --output must be used together')
    if options.input and (options.chat or options.suffix is not None):
        raise InputError('--input cannot be combined with --chat or --suffix; use "messages" or "suffix" in its lines')
    if options.suffix is not None and (options.chat or options.interactive):
        raise InputError('--suffix cannot be combined with --chat or --interactive; remove one of them')
    if options.parse_special and (options.chat or options.suffix is not None):
        raise InputError(
            '--parse-special cannot be combined with --chat or --suffix, which add special tokens; remove one of them'
        )
    if options.interactive and options.num_samples > 1:
        raise InputError(f'--num-samples={options.num_samples}: must be 1 with --interactive')


if __name__ == '__main__':
    run('generate')
