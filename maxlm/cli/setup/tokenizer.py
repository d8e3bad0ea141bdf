"""Compares tokenizers: `maxlm tokenizer data/mine hf:openai-community/gpt2`.

Prints the UTF-8 bytes per token on short sample texts of English, code, maths and other scripts, beside those of GPT-2
and of cl100k_base (GPT-4). With more bytes per token, the same text has fewer tokens. A dash means that the tokenizer
cannot represent the text.
"""

from __future__ import annotations

from pathlib import Path

from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.errors import EXIT_DONE, InputError
from maxlm.formatting import DASH
from maxlm.storage.paths import PathOption


def main(argv: list[str]) -> int:
    """Prints a table with a row for each kind of text and a column for each tokenizer.

    Raises:
        InputError: a tokenizer cannot be loaded, or is not for text.
    """
    options = make_parser().parse_args(argv)

    from maxlm.data.compression.bytes_per_token import OWN, bytes_per_token
    from maxlm.data.tokenizer.tokenizer import TOKENIZER_FILE, make_tokenizer
    from maxlm.planning.tables import table

    measured = {}
    for name in options.names:
        if name == 'chars' or name.startswith('bpe:'):
            raise InputError(f'{name}: not trained yet; prepare data with it, and give the directory of the data')
        path = str(Path(name, TOKENIZER_FILE)) if Path(name).is_dir() else name
        try:
            tokenizer = make_tokenizer(path, [])
        except InputError as error:
            raise InputError(str(error).removeprefix('--tokenizer=')) from error
        found = bytes_per_token(tokenizer)
        if not found:
            raise InputError(f'{name}: its text is numbers; give a tokenizer of text')
        measured[f'{name} ({tokenizer.vocab_size:,} ids)'] = found
    kinds = next(iter(measured.values()))
    published = list(dict.fromkeys(other for values in kinds.values() for other in values if other != OWN))
    rows = [
        [kind, *(_cell(found[kind].get(OWN)) for found in measured.values()), *map(_cell, map(values.get, published))]
        for kind, values in kinds.items()
    ]
    print(table(['bytes per token', *measured, *published], rows))
    return EXIT_DONE


def _cell(value: float | None) -> str:
    return DASH if value is None else f'{value:.2f}'


def make_parser() -> ArgumentParser:
    parser = command_parser('tokenizer', __doc__, 'data/mine hf:openai-community/gpt2')
    parser.add_argument(
        'names',
        nargs='+',
        type=PathOption(),
        metavar='TOKENIZER',
        help='tokenizer.json, directory with one (data set or workdir), hf:NAME[@REVISION], or bytes',
    )
    return parser


if __name__ == '__main__':
    run('tokenizer')
