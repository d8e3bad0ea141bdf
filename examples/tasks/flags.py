"""Flags whose readers prefer green: writes chats, preference pairs and prompts, and measures the true preference.

    python -m examples.tasks.flags --output data/flags

A prompt is the name of a country, and an answer is the stripes of its flag, e.g. `rgby` for red, green, blue and
yellow. Of two flags with four stripes, the one with more green stripes is preferred. A flag with another number of
stripes is never preferred. Chats have flags with four random stripes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.storage.atomic import atomic_write

COLORS, NUM_STRIPES = 'rgby', 4
# Other numbers of stripes, and the fraction of pairs in which the rejected answer has one of them.
WRONG_STRIPES, WRONG_LENGTH = (1, 2, 3, 5, 6, 8, 11), 0.5
LETTERS = 'abcdefghijklmnopqrstuvwxyz'
# Number of countries in each file.
SIZES = {'chats': 1000, 'pairs': 1500, 'prompts': 200, 'held_out': 100}


def is_green(response: str, prompt: dict[str, Any]) -> float:
    """Returns 1.0 if a flag has all its stripes, and at least half of them are green, else 0.0.

    Examples:
        >>> is_green('gggb', {}), is_green('rgby', {}), is_green('gg', {})
        (1.0, 0.0, 0.0)
    """
    del prompt
    is_flag = len(response) == NUM_STRIPES and set(response) <= set(COLORS)
    return float(is_flag and 2 * response.count('g') >= NUM_STRIPES)


def make_entries(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the lines of each file. No country is in more than one file; a seed always gives the same lines."""
    rng = random.Random(seed)
    names = rng.sample([a + b + c for a in LETTERS for b in LETTERS for c in LETTERS], sum(SIZES.values()))

    def flag(num_stripes: int = NUM_STRIPES) -> str:
        return ''.join(rng.choices(COLORS, k=num_stripes))

    def chat(name: str) -> dict[str, Any]:
        return {'messages': [{'role': 'user', 'content': name}, {'role': 'assistant', 'content': flag()}]}

    def pair(name: str) -> dict[str, Any]:
        first, second = flag(), flag()
        while first.count('g') == second.count('g'):
            second = flag()
        rejected, chosen = sorted((first, second), key=lambda stripes: stripes.count('g'))
        if rng.random() < WRONG_LENGTH:
            stripes = rng.choice(WRONG_STRIPES)
            rejected = flag(stripes) if rng.random() < 0.5 else 'g' * stripes
        return {'prompt': name, 'chosen': chosen, 'rejected': rejected}

    makers = {'chats': chat, 'pairs': pair}
    return {
        file: [makers[file](names.pop()) if file in makers else {'prompt': names.pop()} for _ in range(size)]
        for file, size in SIZES.items()
    }


def main(argv: list[str]) -> int:
    """Writes the files and prints their number of lines."""
    parser = ArgumentParser(prog='examples.tasks.flags', allow_abbrev=False, description=__doc__)
    parser.add_argument('--output', type=Path, required=True, metavar='DIR', help='directory of the files')
    parser.add_argument('--seed', type=int, default=0, help='the same seed gives the same files (default 0)')
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for file, entries in make_entries(options.seed).items():
        atomic_write(options.output / f'{file}.jsonl', ''.join(json.dumps(entry) + '\n' for entry in entries))
    print(f'wrote {options.output}: {", ".join(f"{size} {file}" for file, size in SIZES.items())}')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
