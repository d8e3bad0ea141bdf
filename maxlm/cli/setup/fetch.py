"""Fetches files and folders from a bucket.

To resume an interrupted fetch, run the same command: partial files are continued, complete files are skipped. Each file
is verified with a checksum: that of the manifest in a prepared data set, otherwise that of the bucket. Credentials are
those of the protocol's library: GOOGLE_APPLICATION_CREDENTIALS for gs://, AWS_PROFILE or AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY for s3://.
"""

from __future__ import annotations

from maxlm.cli.parser import ArgumentParser, command_parser, number
from maxlm.cli.process import run
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Fetches the files that `argv` names.

    Raises:
        InputError: a file cannot be fetched.
    """
    options = make_parser().parse_args(argv)

    from maxlm.cli.execution.fetch import execute

    return execute(options)


def make_parser() -> ArgumentParser:
    parser = command_parser('fetch', __doc__, '--input gs://bucket/web --output data/web')
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
    add(
        '--max-files',
        type=number(0),
        default=0,
        metavar='N',
        help='fetch the first N files of each URL, by name; 0 = all',
    )
    parser.add_shared('--threads', '--quiet')
    return parser


if __name__ == '__main__':
    run('fetch')
