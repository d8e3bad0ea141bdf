"""Generates text from prompts: `python -m maxlm.generate --checkpoint=runs/first --prompt='Once upon'`.

The checkpoint is a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or the directory of one step. Prompts are
arguments (--prompt), files (--prompt-file), lines typed in a terminal (--interactive), or a JSONL file (--input), whose
completions are written to --output. With --chat, prompts are user messages. Runs on one device.
"""

from __future__ import annotations

import argparse
import sys

from maxlm.config.sections.quantization import KV_CACHE_DTYPES, QUANTIZATION_GROUPS
from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, run_command, text_argument
from maxlm.hints import print_next
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Prints each prompt with its completions or answers, or writes them to a file."""
    options = _parser().parse_args(argv)
    _check(options)

    from maxlm.commands.generate import execute

    execute(options)
    print_next('maxlm', 'serve', f'--checkpoint={options.checkpoint}')
    return EXIT_DONE


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog='maxlm generate',
        allow_abbrev=False,
        description=__doc__,
        epilog='example: python -m maxlm.generate --checkpoint=runs/first --prompt="Once upon"',
    )
    file = PathOption(Kind.FILE, as_path=True)
    parser.add_argument(
        '--checkpoint',
        required=True,
        type=PathOption(Kind.DIRECTORY, ANY),
        help='workdir, WORKDIR@STEP or directory of one step',
    )
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
    parser.add_argument('--num-samples', type=int, default=1, help='continuations per prompt (default 1)')
    parser.add_argument('--temperature', type=float, default=0.8, help='sampling temperature; 0 = greedy (default 0.8)')
    parser.add_argument('--top-k', type=int, default=0, help='sample from the k most likely tokens; 0 = all (default)')
    parser.add_argument(
        '--top-p',
        type=float,
        default=1.0,
        help='sample from the most likely tokens up to this total probability (default 1)',
    )
    parser.add_argument(
        '--min-p', type=float, default=0.0, help='minimum probability relative to the most likely token (default 0)'
    )
    parser.add_argument(
        '--repetition-penalty', type=float, default=1.0, help='penalty for repeated tokens; 1 = none (default)'
    )
    parser.add_argument(
        '--stop', action='append', type=text_argument, help='stop string, not included in the output; repeatable'
    )
    parser.add_argument('--seed', type=int, default=0, help='random seed (default 0)')
    parser.add_argument('--slots', type=int, default=8, help='maximum concurrent continuations (default 8)')
    parser.add_argument(
        '--kv-cache-dtype',
        choices=KV_CACHE_DTYPES,
        default='model',
        help='dtype of the key-value cache (default model)',
    )
    parser.add_argument(
        '--num-draft-tokens',
        type=int,
        default=0,
        help='tokens drafted per pass from the preceding text; 0 = none (default)',
    )
    parser.add_argument(
        '--quantize',
        choices=('', *QUANTIZATION_GROUPS),
        default='',
        help='format to quantize the kernels to while loading',
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    """Checks combinations and ranges that argparse does not check."""
    given = [
        name
        for name, there in {
            '--prompt': options.prompt is not None or options.prompt_file is not None,
            '--interactive': options.interactive,
            '--input': options.input is not None,
        }.items()
        if there
    ]
    if len(given) != 1:
        raise InputError(
            'prompts must be given in exactly one way: --prompt and --prompt-file, --interactive, or --input; '
            f'given: {", ".join(given) or "none"}'
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
    if options.num_samples < 1:
        raise InputError(f'--num-samples={options.num_samples}: must be at least 1')
    if options.interactive and options.num_samples > 1:
        raise InputError(f'--num-samples={options.num_samples}: must be 1 with --interactive')
    if options.slots < 1:
        raise InputError(f'--slots={options.slots}: must be at least 1')
    if not 0 <= options.seed < 2**32:
        raise InputError(f'--seed={options.seed}: must be at least 0 and below 2³² = {2**32}')


def run() -> None:
    """Entry point of `python -m maxlm.generate` and `maxlm generate`."""
    disable_malloc_trim()
    sys.exit(run_command(main))


if __name__ == '__main__':
    run()
