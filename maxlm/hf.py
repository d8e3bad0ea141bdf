"""Imports and exports models in the format of Hugging Face Transformers, on local disks.

    python -m maxlm.hf import --input=DIR --output=WORKDIR
    python -m maxlm.hf export --checkpoint=CKPT --output=DIR [--dtype=bfloat16] [--max-shard-size=1GB]
    python -m maxlm.hf export-adapter --checkpoint=CKPT --output=DIR [--base=NAME_OR_DIR]
    python -m maxlm.hf export-gguf --checkpoint=CKPT --output=FILE.gguf [--dtype=q8_0]

CKPT is a workdir (its newest step), `WORKDIR@STEP`, or the directory of one step. import creates a workdir with the
model as step 0, for evaluation, generation, and further training with `--config.train.init_from=WORKDIR`. For a run
with adapters (model.lora_rank), export merges them into the model, and export-adapter writes only the adapters, for
PEFT. export-gguf writes one file for llama.cpp, for the architectures that it runs (docs/models.md). Quantized weights
are dequantized.
"""

from __future__ import annotations

import argparse
import re
import sys

from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code
from maxlm.formatting import format_bytes
from maxlm.hints import print_next
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.config_conversion import AUTO
from maxlm.huggingface.export_gguf import BLOCK, TYPES, export_gguf
from maxlm.huggingface.export_model import DTYPE, export_model
from maxlm.huggingface.export_peft import export_adapter
from maxlm.huggingface.import_model import import_model
from maxlm.huggingface.tensors.safetensors_io import DTYPES
from maxlm.log import Console
from maxlm.storage.filesystem import display_path, is_url
from maxlm.storage.paths import ANY, BUCKETS, Kind, PathOption
from maxlm.workdir.files import CONFIG
from maxlm.workdir.upload_directory import Upload

CHECKPOINT = 'workdir (newest step), WORKDIR@STEP, or directory of one step'
UNITS = {'': 1, 'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'TB': 10**12, 'KIB': 2**10, 'MIB': 2**20, 'GIB': 2**30}


def main(argv: list[str]) -> int:
    """Imports or exports one model."""
    options = _parse(argv)
    with Console():
        if options.command == 'import':
            done = import_model(options.input, options.output, show=True)
            print(f'{done.workdir}: {done.class_name} of {done.parameters:,} parameters')
            print_next('maxlm', 'generate', f'--checkpoint={done.workdir}', '--prompt=Hello')
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
        f'{format_bytes(exported.bytes)} in {options.dtype}'
    )
    if not upload:
        print_next('maxlm', 'serve', f'--checkpoint={output}')
    return EXIT_DONE


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog='maxlm hf',
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='example:\n  maxlm hf import --input=Qwen3-0.6B --output=runs/qwen3',
    )
    commands = parser.add_subparsers(dest='command', required=True, metavar='import|export|export-adapter|export-gguf')

    def command(name: str, help: str, example: str) -> ArgumentParser:
        return commands.add_parser(
            name,
            allow_abbrev=False,
            help=help,
            description=f'{help[0].upper()}{help[1:]}.',
            epilog=f'example:\n  maxlm hf {name} {example}',
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    importer = command(
        'import', 'creates a workdir from a Transformers directory', '--input=Qwen3-0.6B --output=runs/qwen3'
    )
    local, checkpoint = PathOption(Kind.DIRECTORY), PathOption(Kind.DIRECTORY, ANY)
    importer.add_argument(
        '--input', type=local, required=True, help='Transformers directory with config.json and safetensors'
    )
    importer.add_argument('--output', type=local, required=True, help='new workdir')
    exporter = command(
        'export',
        'writes a checkpoint as a Transformers directory',
        '--checkpoint=runs/qwen3 --output=exported --dtype=bfloat16',
    )
    exporter.add_argument('--checkpoint', type=checkpoint, required=True, help=CHECKPOINT)
    exporter.add_argument(
        '--output',
        type=PathOption(Kind.DIRECTORY, BUCKETS),
        required=True,
        help='new directory or URL (gs://…, s3://…)',
    )
    exporter.add_argument(
        '--cache',
        type=PathOption(Kind.DIRECTORY),
        default='~/.cache/maxlm',
        help='local directory for the files before upload, if --output is a URL (%(default)s)',
    )
    exporter.add_argument('--dtype', choices=list(DTYPES), default=DTYPE, help='dtype of the weights (%(default)s)')
    exporter.add_argument('--max-shard-size', default='1GB', help='maximum size of a file, e.g. 500MB (%(default)s)')
    adapter = command(
        'export-adapter',
        'writes the adapters of a checkpoint for PEFT',
        '--checkpoint=runs/lora --output=adapter --base=Qwen/Qwen3-0.6B',
    )
    adapter.add_argument('--checkpoint', type=checkpoint, required=True, help=CHECKPOINT)
    adapter.add_argument('--output', type=local, required=True, help='new directory')
    adapter.add_argument(
        '--base',
        type=PathOption(may_be_empty=True),
        default='',
        help='name or directory of the base model, from which PEFT loads it '
        '(default: not written, and the base model must equal train.init_from)',
    )
    for one in (exporter, adapter):
        one.add_argument(
            '--architecture',
            choices=[AUTO, *ARCHITECTURES],
            default=AUTO,
            help='Transformers architecture (%(default)s: the one of its family, else one that can express the model; '
            'never nanochat, which vLLM does not support)',
        )
    single = command(
        'export-gguf',
        'writes a checkpoint as one GGUF file for llama.cpp',
        '--checkpoint=runs/qwen3 --output=qwen3.gguf --dtype=q8_0',
    )
    single.add_argument('--checkpoint', type=checkpoint, required=True, help=CHECKPOINT)
    single.add_argument('--output', type=PathOption(Kind.FILE), required=True, help='new file')
    single.add_argument('--dtype', choices=TYPES, default='f16', help='dtype of the matrices (%(default)s)')
    return parser.parse_args(argv)


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


def run() -> None:
    """Entry point of `python -m maxlm.hf` and `maxlm hf`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
