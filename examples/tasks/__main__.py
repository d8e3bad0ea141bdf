"""Writes chats for SFT and prompts for GRPO: `python -m examples.tasks arithmetic|synth --output DIR`.

DIR/chats.jsonl is the input of `maxlm prepare --format chat`. DIR/prompts.jsonl is for grpo.prompts, DIR/held_out.jsonl
for grpo.eval_prompts. No problem is in more than one file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from examples.tasks import arithmetic, synth
from examples.tasks.problem import Problem, write_problems
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code, flag


class Kind(NamedTuple):
    """A kind of problems.

    Attributes:
        make: returns all problems for a seed.
        num: default number of chats, and of prompts.
        held_out: default number of held-out prompts.
        wrong_share: default probability of a mistake in a chat.
    """

    make: Callable[[int], list[Problem]]
    num: int
    held_out: int
    wrong_share: float


KINDS = {
    'arithmetic': Kind(arithmetic.make_problems, 2000, 400, 0.7),
    'synth': Kind(synth.make_problems, 500, 200, 0.5),
}


def main(argv: list[str]) -> int:
    """Writes the files and prints their number of entries."""
    parser = ArgumentParser(prog='examples.tasks', allow_abbrev=False, description=__doc__)
    parser.add_argument('kind', choices=KINDS, help='topic of the problems')
    parser.add_argument('--output', type=Path, required=True, metavar='DIR', help='directory of the files')
    parser.add_argument('--seed', type=int, default=0, help='the same seed gives the same files (default 0)')
    defaults = {
        name: ', '.join(f'{kind} {getattr(value, name)}' for kind, value in KINDS.items()) for name in Kind._fields[1:]
    }
    parser.add_argument(
        '--problems', type=int, metavar='N', help=f'number of chats and of prompts (default: {defaults["num"]})'
    )
    parser.add_argument(
        '--held-out',
        type=int,
        metavar='N',
        help=f'number of additional prompts for evaluation (default: {defaults["held_out"]})',
    )
    parser.add_argument(
        '--wrong-share',
        type=float,
        metavar='X',
        help='fraction of chats in which the teacher makes the mistake, for problems that have one '
        f'(default: {defaults["wrong_share"]})',
    )
    options = parser.parse_args(argv)
    kind = KINDS[options.kind]
    num = kind.num if options.problems is None else options.problems
    held_out = kind.held_out if options.held_out is None else options.held_out
    wrong_share = kind.wrong_share if options.wrong_share is None else options.wrong_share
    for name, value in (('problems', num), ('held_out', held_out)):
        if value < 1:
            raise InputError(f'{flag(name)}={value}: must be at least 1')
    if not 0 <= wrong_share <= 1:
        raise InputError(f'--wrong-share={wrong_share}: must be from 0 to 1')
    if options.seed < 0:
        raise InputError(f'--seed={options.seed}: must be at least 0')
    counts = write_problems(
        kind.make(options.seed),
        options.output,
        num=num,
        held_out=held_out,
        wrong_share=wrong_share,
        seed=options.seed,
    )
    print(
        f'wrote {options.output}: {counts.chats} chats ({counts.mistakes} with a mistake), {counts.prompts} prompts, '
        f'{counts.held_out} held out'
    )
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
