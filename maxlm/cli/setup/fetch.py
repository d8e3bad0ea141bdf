"""Fetches files and prepared data sets from a bucket to a local directory: `python -m maxlm.fetch`.

Example: `python -m maxlm.fetch --input gs://bucket/web --output data/web`.
"""

from __future__ import annotations

import argparse
import sys

from maxlm.errors import ArgumentParser, InputError, flag, run_command
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Fetches the files that `argv` names.

    Raises:
        InputError: a file cannot be fetched.
    """
    options = _parse(argv)

    from maxlm.commands.fetch import execute

    return execute(options)


def run() -> None:
    """Entry point of `python -m maxlm.fetch` and `maxlm fetch`. Exits with 0, or with 2 after bad input."""
    sys.exit(run_command(main))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog='maxlm fetch',
        allow_abbrev=False,
        description='Fetches files and folders from a bucket. To resume an interrupted fetch, run the same command: '
        'partial files are continued, complete files are skipped. Each file is verified with a checksum: that of '
        'the manifest in a prepared data set, otherwise that of the bucket. Credentials are those of the '
        "protocol's library: GOOGLE_APPLICATION_CREDENTIALS for gs://, AWS_PROFILE or AWS_ACCESS_KEY_ID and "
        'AWS_SECRET_ACCESS_KEY for s3://.',
        epilog='example: python -m maxlm.fetch --input gs://bucket/web --output data/web',
    )
    add = parser.add_argument
    add(
        '--input',
        nargs='+',
        required=True,
        type=PathOption(urls=ANY),
        metavar='URL',
        help='files, folders and globs: gs://…, s3://… or any other protocol of fsspec',
    )
    add(
        '--output',
        type=PathOption(Kind.DIRECTORY, as_path=True),
        required=True,
        metavar='DIR',
        help='destination directory',
    )
    add('--include', default='', metavar='GLOB', help="fetch only matching files, e.g. '*.parquet' or 'train/*'")
    add('--max-files', type=int, default=0, metavar='N', help='fetch the first N files of each URL, by name; 0 = all')
    add('--threads', type=int, default=8, metavar='N', help='number of parallel downloads (%(default)s)')
    add('--quiet', action='store_true', help='print only errors and warnings')
    options = parser.parse_args(argv)
    for name, smallest in {'threads': 1, 'max_files': 0}.items():
        if getattr(options, name) < smallest:
            raise InputError(f'{flag(name)}={getattr(options, name)}: must be at least {smallest}')
    return options


if __name__ == '__main__':
    run()
