"""`python -m maxlm.prepare`: text → tokenizer, tokens and records that training reads."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from maxlm.data.assemble import assemble
from maxlm.data.groups import Group, read_result, write_atomically
from maxlm.data.records import MANIFEST_NAME, Dataset, load_manifest, save_manifest
from maxlm.data.sources import Document, InputFile, find_inputs, raise_bad, read_documents, refuse_overlap
from maxlm.data.splits import HASH_RANGE, SAMPLE_BYTES, group_files, name_hash, sample_texts, validation_threshold
from maxlm.data.tokenizer import TOKENIZER_FILE, Tokenizer, check_spec, make_tokenizer
from maxlm.data.workers import write_groups
from maxlm.errors import ArgumentParser, InputError, exit_code, os_message

# What an interrupted run may leave behind, all of it made by this program.
LEFTOVERS = ('group-*.json', 'train-*.arrayrecord', 'validation-*.arrayrecord', '.*.partial')
# Left-out documents that are printed; dataset.json lists them all.
LEFT_OUT_SHOWN = 10


def main(argv: list[str]) -> int:
    """Makes the data set that `argv` asks for. Raises InputError when it cannot be made."""
    options = _parse(argv)
    check_spec(options.tokenizer)
    training = find_inputs(options.input, exclude=options.exclude)
    validation = find_inputs(options.validation, exclude=options.exclude) if options.validation else []
    refuse_overlap(training, validation)
    made_from = _made_from(options, training, validation)
    with _locked(options.output):
        if (options.output / MANIFEST_NAME).exists():
            dataset = load_manifest(options.output)
            _refuse_other_data(dataset, made_from)
            message = f'{options.output} is already prepared from these inputs'
        else:
            dataset = _make(options, training, validation, made_from)
            message = f'wrote {options.output}'
        _remove_leftovers(dataset)
    if not options.quiet:
        _print_summary(dataset, message)
    return 0


def run() -> None:
    """Entry point: exits with 0 when the data set is there, 2 after bad input."""
    sys.exit(exit_code(main, sys.argv[1:]))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog='maxlm.prepare',
        allow_abbrev=False,
        description='Turns text into the records that training reads. Started again after an interruption it goes on.',
    )
    add = parser.add_argument
    add('--input', nargs='+', type=Path, required=True, metavar='PATH', help='text files, .jsonl files, directories')
    add('--output', type=Path, required=True, metavar='DIR', help='directory of the data set')
    add(
        '--tokenizer',
        default='bpe:8192',
        metavar='SPEC',
        help='bytes, chars, bpe:N (N ids learned from up to 32 MB of the text), or a tokenizer.json (%(default)s)',
    )
    add('--validation', nargs='+', type=Path, metavar='PATH', help='what to validate on, instead of a share of --input')
    add(
        '--validation_share',
        type=float,
        default=0.01,
        metavar='X',
        help='share of the documents to validate on, chosen by a hash of their names (%(default)s)',
    )
    add('--exclude', nargs='+', default=[], metavar='NAME', help='names of directories to leave out')
    add('--text_key', default='text', metavar='KEY', help='where the text is in a line of JSONL (%(default)s)')
    add('--skip_bad', action='store_true', help='leave out what cannot be read, and list it, instead of stopping')
    add('--block', type=int, default=2048, metavar='N', help='tokens in a record (%(default)s)')
    add(
        '--workers', type=int, default=_num_cores(), metavar='N', help='processes; the result is the same (%(default)s)'
    )
    add('--quiet', action='store_true', help='print errors only')
    options = parser.parse_args(argv)
    for name, smallest in {'block': 1, 'workers': 1}.items():
        if getattr(options, name) < smallest:
            raise InputError(f'--{name}={getattr(options, name)}: needs {smallest} or more')
    if not 0 <= options.validation_share < 1:
        raise InputError(f'--validation_share={options.validation_share}: needs a share from 0 to below 1')
    return options


def _num_cores() -> int:
    # Fewer than the machine has where the process is confined to some.
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _made_from(
    options: argparse.Namespace, training: Sequence[InputFile], validation: Sequence[InputFile]
) -> dict[str, Any]:
    """All that decides the result, to compare with what a finished data set was made from."""
    files = [[(f.name, f.source, f.kind, f.size, f.mtime_ns) for f in part] for part in (training, validation)]
    tokenizer = options.tokenizer
    if Path(tokenizer).is_file() and tokenizer not in ('bytes', 'chars'):
        tokenizer = f'file with checksum {Tokenizer.load(tokenizer).sha256}'
    return {
        'tokenizer': tokenizer,
        'validation_share': 0.0 if validation else options.validation_share,
        'text_key': options.text_key,
        'skip_bad': options.skip_bad,
        'block': options.block,
        'inputs': hashlib.sha256(json.dumps(files).encode()).hexdigest(),
    }


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Makes the directory and keeps other runs out of it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK | os.X_OK):
            raise PermissionError(0, 'no permission to write')
        directory = os.open(output, os.O_RDONLY)
    except OSError as error:
        raise InputError(f'--output={output}: {os_message(error)}; give a directory that can be written') from error
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f'--output={output}: another maxlm.prepare is writing there') from error
        yield
    finally:
        os.close(directory)


def _refuse_other_data(dataset: Dataset, made_from: dict[str, Any]) -> None:
    changes = [
        f'{name} {dataset.made_from.get(name)}, not {value}' if name != 'inputs' else 'other input files'
        for name, value in made_from.items()
        if dataset.made_from.get(name) != value
    ]
    if changes:
        raise InputError(
            f'{dataset.path} holds a data set made from {"; ".join(changes)}; choose another --output or delete it'
        )


def _make(
    options: argparse.Namespace,
    training: Sequence[InputFile],
    validation: Sequence[InputFile],
    made_from: dict[str, Any],
) -> Dataset:
    def documents() -> Iterator[Document]:
        # What is bad is reported when it is written.
        on_bad = (lambda name, reason: None) if options.skip_bad else raise_bad
        for file in training:
            yield from read_documents(file, text_key=options.text_key, on_bad=on_bad)

    share = made_from['validation_share']
    threshold = validation_threshold((document.name for document in documents()), share)
    trained_on = (document for document in documents() if name_hash(document.name) >= threshold)
    sample_share = min(1.0, SAMPLE_BYTES / sum(file.size for file in training))
    tokenizer = make_tokenizer(options.tokenizer, sample_texts(trained_on, sample_share))
    write_atomically(options.output / TOKENIZER_FILE, tokenizer.to_json())

    parts = [(files, threshold) for files in group_files(training)]
    parts += [(files, HASH_RANGE) for files in group_files(validation)]
    groups = [
        Group(
            output=options.output.resolve(),
            number=number,
            files=files,
            validation_below=below,
            tokenizer_sha256=tokenizer.sha256,
            block=options.block,
            text_key=options.text_key,
            skip_bad=options.skip_bad,
        )
        for number, (files, below) in enumerate(parts)
    ]
    _write(groups, options)
    spec, _, _ = options.tokenizer.partition(':')
    kind = spec if spec in ('bytes', 'chars', 'bpe') else 'file'
    dataset = assemble(groups, tokenizer, tokenizer_kind=kind, made_from=made_from, output=options.output)
    save_manifest(dataset)
    return dataset


def _write(groups: Sequence[Group], options: argparse.Namespace) -> None:
    size = {group: sum(file.size for file in group.files) for group in groups}
    unfinished = [group for group in groups if read_result(group) is None]
    counts = [0, 0]
    with tqdm(
        total=sum(size.values()),
        initial=sum(size.values()) - sum(size[group] for group in unfinished),
        unit='B',
        unit_scale=True,
        desc='prepare',
        # None: only where standard error is a terminal.
        disable=True if options.quiet else None,
    ) as bar:

        def on_progress(num_bytes: int, documents: int, tokens: int) -> None:
            counts[0] += documents
            counts[1] += tokens
            bar.set_postfix_str(f'{counts[0]:,} documents, {counts[1]:,} tokens', refresh=False)
            bar.update(num_bytes)

        write_groups(unfinished, workers=options.workers, on_progress=on_progress)


def _remove_leftovers(dataset: Dataset) -> None:
    kept = {shard.name for split in dataset.splits.values() for shard in split.shards}
    for pattern in LEFTOVERS:
        for path in dataset.path.glob(pattern):
            if path.name not in kept:
                path.unlink()


def _print_summary(dataset: Dataset, message: str) -> None:
    print(f'{message}: vocabulary {dataset.vocab_size:,}, fingerprint {dataset.fingerprint[:12]}')
    for name, split in dataset.splits.items():
        if not split.documents:
            print(f'  {name}: empty; --validation or a larger --validation_share fills it')
            continue
        print(
            f'  {name}: {split.documents:,} documents, {split.tokens:,} tokens, '
            f'{split.text_bytes / split.tokens:.2f} bytes per token, '
            f'unigram entropy {split.unigram_entropy:.3f} nats per token'
        )
        if len(split.sources) > 1:
            print('    ' + ', '.join(f'{source} {counts.share:.1%}' for source, counts in split.sources.items()))
    if dataset.left_out:
        print(f'  left out: {len(dataset.left_out):,}, all listed in {dataset.path / MANIFEST_NAME}')
        for entry in dataset.left_out[:LEFT_OUT_SHOWN]:
            print(f'    {entry["name"]}: {entry["reason"]}')


if __name__ == '__main__':
    run()
