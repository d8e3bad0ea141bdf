"""Imports and exports models of Hugging Face, GGUF and nanochat."""

from __future__ import annotations

import argparse
import re

from maxlm.cli.hints import print_generate, print_next
from maxlm.errors import EXIT_DONE, InputError
from maxlm.formatting import format_bytes
from maxlm.huggingface.export_model import export_model
from maxlm.huggingface.export_peft import export_adapter
from maxlm.huggingface.gguf.export_gguf import BLOCK, export_gguf
from maxlm.huggingface.gguf.import_gguf import find_gguf, import_gguf
from maxlm.huggingface.import_model import Imported, import_model
from maxlm.huggingface.nanochat.export_checkpoint import export_checkpoint
from maxlm.huggingface.nanochat.import_checkpoint import find_checkpoint, import_checkpoint
from maxlm.huggingface.tensors.hub import HUB, download_model
from maxlm.log import Console
from maxlm.storage.filesystem import display_path, is_url
from maxlm.workdir.files import CONFIG
from maxlm.workdir.upload_directory import Upload


def execute(options: argparse.Namespace) -> int:
    """Imports or exports one model."""
    with Console():
        if options.command == 'import':
            done = _import(options)
            print(f'{done.workdir}: {done.class_name} of {done.parameters:,} parameters')
            for label, tokens in done.boundaries.items():
                print(f'  {label}: {tokens}')
            print_generate(options.output)
            return EXIT_DONE
        if options.command == 'export-adapter':
            written = export_adapter(
                options.checkpoint, options.output, base=options.base, architecture=options.architecture, show=True
            )
            print(
                f'{written.directory}: adapters of {written.parameters:,} parameters for {written.class_name} '
                f'({", ".join(written.targets)})'
            )
            print_next(
                'maxlm',
                'checkpoints',
                'merge',
                f'--checkpoint={options.checkpoint}',
                f'--output={written.directory}-merged',
            )
            return EXIT_DONE
        if options.command == 'export-gguf':
            file = export_gguf(options.checkpoint, options.output, dtype=options.dtype, show=True)
            unquantized = (
                f'; {len(file.float16_tensors)} matrices in f16, because their row size is not a multiple of {BLOCK}'
                if file.float16_tensors
                else ''
            )
            print(
                f'{file.path}: {file.kind} of {file.parameters:,} parameters, {format_bytes(file.bytes)}{unquantized}'
            )
            print_next('llama-cli', '-m', str(file.path), '-p', 'Hello')
            return EXIT_DONE
        if options.command == 'export-nanochat':
            saved = export_checkpoint(options.checkpoint, options.output, dtype=options.dtype, show=True)
            print(
                f'{saved.directory}: {", ".join(saved.files)} of {saved.parameters:,} parameters, '
                f'{format_bytes(saved.bytes)} in {options.dtype}'
            )
            return EXIT_DONE
        upload = _upload(options)
        exported = export_model(
            options.checkpoint,
            str(upload.folder) if upload else options.output,
            architecture=options.architecture,
            dtype=options.dtype,
            max_shard_size=parse_size(options.max_shard_size),
            show=True,
        )
        if upload:
            upload.finish(show=True)
    output = display_path(options.output) if upload else exported.directory
    print(
        f'{output}: {exported.class_name} of {exported.parameters:,} parameters, '
        f'{format_bytes(exported.bytes)} in {exported.dtype}'
    )
    if not upload:
        print_next('maxlm', 'serve', f'--checkpoint={output}')
    return EXIT_DONE


def _import(options: argparse.Namespace) -> Imported:
    if options.input.startswith(HUB):
        options.input = str(download_model(options.input.removeprefix(HUB)))
    if file := find_gguf(options.input):
        return import_gguf(file, options.output, tokenizer=options.tokenizer, show=True)
    if checkpoint := find_checkpoint(options.input):
        return import_checkpoint(checkpoint, options.output, tokenizer=options.tokenizer, show=True)
    if options.tokenizer:
        raise InputError(
            f'--tokenizer={options.tokenizer}: applies only to GGUF files and checkpoints of nanochat, and '
            f'--input={options.input} is neither; copy tokenizer.json into that directory instead'
        )
    return import_model(options.input, options.output, show=True)


UNITS = {'': 1, 'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'TB': 10**12, 'KIB': 2**10, 'MIB': 2**20, 'GIB': 2**30}


def _upload(options: argparse.Namespace) -> Upload | None:
    """Prepares the upload of an export to a bucket; returns None if the output is a local directory."""
    if not is_url(options.output):
        return None
    upload = Upload('--output', options.output, cache=options.cache, last=CONFIG)
    upload.check_new()
    # The same checkpoint gives the same bytes, so files that an interrupted upload has sent are not sent again.
    upload.discard()
    return upload


def parse_size(text: str) -> int:
    """Parses a size such as 500MB (10⁶) or 1GiB (2³⁰) and returns it in bytes.

    Raises:
        InputError: the size is invalid or zero.
    """
    match = re.fullmatch(r'(\d+(?:\.\d+)?) ?([a-z]*)', text.strip(), re.IGNORECASE)
    unit = UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise InputError(f'--max-shard-size={text}: not a valid size; use e.g. 500MB or 1GB')
    return size
