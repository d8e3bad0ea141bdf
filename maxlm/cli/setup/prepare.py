"""Converts text to a tokenizer and tokenized records: `maxlm prepare --input texts/ --output data/web`."""

from __future__ import annotations

import os

from maxlm.cli.hints import print_next
from maxlm.cli.parser import ArgumentParser, command_parser, text_argument
from maxlm.cli.process import run
from maxlm.data.filters.filters_by_name import FILTERS
from maxlm.data.parts.share import STAGES
from maxlm.data.prepare.options import PrepareOptions
from maxlm.data.tokenizer.tokenizer import SPECS
from maxlm.errors import escape_controls
from maxlm.storage.paths import ANY, BUCKETS, Kind, PathOption


def main(argv: list[str]) -> int:
    """Prepares the data set that `argv` describes. Raises InputError if that is not possible."""
    options = parse(argv)

    from maxlm.cli.training_hint import training_command
    from maxlm.data.prepare.prepare_dataset import prepare_dataset
    from maxlm.data.prepare.summary import skipped_files

    output = prepare_dataset(options)
    if not options.quiet:
        # File names need not be valid text.
        print(escape_controls('\n'.join([*output.summary, *skipped_files(output.not_text)])))
        if output.dataset is None:
            _print_next_stage(argv, options)
            return 0
        command = training_command(
            options.output, output.format, options.pack_seq_len, tokenizer=options.tokenizer, dataset=output.dataset
        )
        print_next(*command)
    return 0


def _print_next_stage(argv: list[str], options: PrepareOptions) -> None:
    """Prints the command of the next stage, unless other tasks of this stage may be running."""
    if options.task or any(name.startswith('SLURM_ARRAY') for name in os.environ):
        return
    kept = [word for word in argv if not word.startswith('--stage=')]
    if '--stage' in kept:
        place = kept.index('--stage')
        del kept[place : place + 2]
    print_next('maxlm', 'prepare', *kept, f'--stage={STAGES[STAGES.index(options.stage) + 1]}')


def parse(argv: list[str]) -> PrepareOptions:
    """Returns the options of a command line. Raises InputError if a value is invalid for any input."""
    return PrepareOptions(**vars(make_parser().parse_args(argv)))


def make_parser() -> ArgumentParser:
    parser = command_parser(
        'prepare',
        'Converts text to tokenized records for training. To resume, run the same command again.',
        '--input texts/ --output data/web --tokenizer bpe:32000',
    )
    what = parser.add_argument_group('input and output').add_argument
    what(
        '--input',
        nargs='+',
        required=True,
        type=PathOption(urls=ANY),
        metavar='PATH',
        help='text, .jsonl[.gz|.zst], .parquet and token files (.npy .npz .bin), directories, globs, URLs of them, '
        'hf:NAME[:CONFIG][@REVISION][#SPLIT], tfds:NAME[#SPLIT]',
    )
    what(
        '--output',
        type=PathOption(Kind.DIRECTORY, BUCKETS, as_path=True),
        required=True,
        metavar='DIR',
        help='output directory, or a URL (gs://…, s3://…)',
    )
    what('--validation', nargs='+', type=PathOption(urls=ANY), metavar='PATH', help='validation inputs')
    what(
        '--validation-fraction',
        type=float,
        metavar='X',
        help='fraction of documents for validation, selected by a hash of their names (%(default)s)',
    )
    what('--exclude', nargs='+', metavar='NAME', help='names or patterns of files to skip')
    what('--max-files', type=int, metavar='N', help='read the first N files of each input; 0 = all')
    what(
        '--format',
        choices=('auto', 'text', 'chat', 'preference'),
        help='format of records: text, conversations or preferences; auto detects it in the first (%(default)s)',
    )
    what(
        '--text-field',
        '--text-key',
        dest='text_key',
        type=text_argument,
        metavar='NAME',
        help='text field: key in JSONL, column in Parquet and data sets; meta.text if nested (%(default)s)',
    )
    metadata = 'columns of Parquet and of data sets that filters receive as metadata'
    what('--metadata-fields', nargs='+', type=text_argument, metavar='NAME', help=metadata)
    what(
        '--messages-field',
        type=text_argument,
        metavar='NAME',
        help='field that contains the messages (messages, conversations)',
    )
    what(
        '--roles',
        type=text_argument,
        metavar='ROLE=NAME,…',
        help='role names used in the messages, for example user=human,assistant=bot',
    )
    what(
        '--max-record-mib',
        type=int,
        metavar='N',
        help='maximum record size in MiB: JSONL line, text of a row, decompressed text file (%(default)s)',
    )
    what('--token-dtype', choices=('uint16', 'uint32'), help='dtype of raw .bin token files')
    what(
        '--eod-token',
        type=int,
        metavar='ID',
        help="id that ends a document in token files (the tokenizer's end-of-document token)",
    )
    what('--skip-bad-records', action='store_true', help='skip and list unreadable records instead of stopping')

    made = parser.add_argument_group('processing').add_argument
    made(
        '--tokenizer',
        type=PathOption(),
        metavar='SPEC',
        help=f'{SPECS}; bpe trains on up to 32 MB of the text (%(default)s)',
    )
    names = f'filters to apply: {", ".join(FILTERS)}, decontaminate:PATH, or your own package.module:function'
    made('--filter', nargs='+', action='extend', metavar='NAME', help=names)
    made('--deduplicate', choices=('none', 'exact', 'near'), help='remove exact or near duplicates (%(default)s)')
    made(
        '--dedup-threshold',
        type=float,
        metavar='X',
        help='minimum Jaccard similarity of five-word shingles for near duplicates (%(default)s)',
    )
    made(
        '--fim-rate',
        type=float,
        metavar='X',
        help='fraction of documents to rearrange for fill-in-the-middle (%(default)s; typically 0.5)',
    )
    made(
        '--fim-spm-rate',
        type=float,
        metavar='X',
        help='fraction of rearranged documents with the suffix first (%(default)s)',
    )
    made(
        '--chat-template',
        type=PathOption(may_be_empty=True),
        metavar='FILE|NAME',
        help='chat template: a Jinja file, chatml or llama3 (default: the template next to --tokenizer, or chatml)',
    )
    made(
        '--special-tokens',
        nargs='+',
        type=text_argument,
        metavar='TOKEN',
        help='special tokens of the chat template that do not look like <|…|>',
    )
    made(
        '--pack-seq-len',
        type=int,
        metavar='N',
        help='pack conversations or pairs into sequences of N tokens, data.seq_len of training (0 = off)',
    )
    made('--stream', action='store_true', help='let training start before the end: it reads the shards in order')
    made('--block', type=int, metavar='N', help='tokens per record (%(default)s)')

    how = parser.add_argument_group('execution (does not affect the result)').add_argument
    how('--workers', type=int, metavar='N', help='number of local worker processes (one per core)')
    how(
        '--executor',
        choices=('local', 'ray'),
        help='ray: a cluster that shares the disk of --output or has a bucket in common',
    )
    how('--ray-address', metavar='ADDRESS', help='cluster address (RAY_ADDRESS, or this machine)')
    stages = 'run only this stage, for example in a Slurm array; in this order (default: all stages)'
    how('--stage', choices=STAGES, help=stages)
    how(
        '--task',
        metavar='I/N',
        help='share I (from 0) of N of the stage scan or shards (share of a Slurm array, or all)',
    )
    how('--retries', type=int, metavar='N', help='retries of a failed partition (%(default)s)')
    how('--skip-failed', action='store_true', help='skip and list partitions that fail after all retries')
    how(
        '--cache',
        type=PathOption(Kind.DIRECTORY),
        metavar='DIR',
        help='local directory for the data set before upload, if --output is a URL (%(default)s)',
    )
    parser.add_shared('--quiet')
    # Required options need no default. argparse can only extend lists.
    parser.set_defaults(**{**vars(PrepareOptions(input=(), output='')), 'filter': []})
    return parser


if __name__ == '__main__':
    run('prepare')
