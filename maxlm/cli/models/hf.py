"""Imports and exports models in the formats of Hugging Face Transformers, GGUF and nanochat.

    maxlm hf import --input=DIR|FILE.gguf|hf:NAME[@REVISION] --output=WORKDIR [--tokenizer=FILE|DIR|ids:N]
    maxlm hf export --checkpoint=CKPT --output=DIR [--dtype=bfloat16] [--max-shard-size=1GB]
    maxlm hf export-adapter --checkpoint=CKPT --output=DIR [--base=NAME_OR_DIR]
    maxlm hf export-gguf --checkpoint=CKPT --output=FILE.gguf [--dtype=q8_0]
    maxlm hf export-nanochat --checkpoint=CKPT --output=DIR [--dtype=bfloat16]

CKPT is a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or the directory of one step. import creates a
workdir with the model as step 0, for evaluation, generation, and further training with
`--config.train.init_from=WORKDIR`. For a run with adapters (model.lora_rank), export merges them into the model, and
export-adapter writes only the adapters, for PEFT. export-gguf writes one file for llama.cpp, for the architectures that
it runs (docs/models.md). Quantized weights are dequantized.

import also reads GGUF files of the same architectures, dequantized, with their vocabulary and chat template. It reads
the files of nanochat (model_NNNNNN.pt, meta_NNNNNN.json, tokenizer.pkl) without PyTorch and without running their
pickles, and export-nanochat writes them.
"""

from __future__ import annotations

from typing import get_args

from maxlm.cli.parser import ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.config.schema import ArchitectureName, ExportConfig
from maxlm.huggingface.tensors.export_dtypes import GGUF_DTYPES, SAFETENSORS_DTYPES
from maxlm.storage.paths import BUCKETS, Kind, PathOption


def main(argv: list[str]) -> int:
    """Imports or exports one model."""
    options = make_parser().parse_args(argv)

    from maxlm.cli.execution.hf import execute

    return execute(options)


def make_parser() -> ArgumentParser:
    parser = command_parser('hf', __doc__, 'import --input=Qwen3-0.6B --output=runs/qwen3')
    commands = parser.add_subparsers(
        dest='command', required=True, metavar='import|export|export-adapter|export-gguf|export-nanochat'
    )

    def command(name: str, help: str, example: str) -> ArgumentParser:
        return commands.add_parser(
            name,
            help=help,
            description=f'{help[0].upper()}{help[1:]}.',
            epilog=f'example:\n  maxlm hf {name} {example}',
        )

    importer = command(
        'import',
        'creates a workdir from a model of Transformers, llama.cpp (GGUF) or nanochat',
        '--input=Qwen3-0.6B --output=runs/qwen3',
    )
    local = PathOption(Kind.DIRECTORY)
    importer.add_argument(
        '--input',
        type=PathOption(advice='give a local directory, or a local .gguf file or model_NNNNNN.pt'),
        required=True,
        help='Transformers directory with config.json and safetensors, hf:NAME[@REVISION] of the Hugging Face Hub, '
        'GGUF file, directory of nanochat with model_NNNNNN.pt and meta_NNNNNN.json (its newest step), or one '
        'model_NNNNNN.pt',
    )
    importer.add_argument(
        '--tokenizer',
        type=PathOption(may_be_empty=True),
        default='',
        help='for GGUF: tokenizer.json or its directory (default: the vocabulary of the file); for nanochat: also '
        'tokenizer.pkl, or ids:N[:END] for N token ids as text, of which END ends documents (default: beside the '
        "checkpoint, or in nanochat's directory tokenizer)",
    )
    importer.add_argument('--output', type=local, required=True, help='new workdir')
    exporter = command(
        'export',
        'writes a checkpoint as a Transformers directory',
        '--checkpoint=runs/qwen3 --output=exported --dtype=bfloat16',
    )
    exporter.add_shared('--checkpoint')
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
    exporter.add_argument(
        '--dtype',
        choices=('auto', *SAFETENSORS_DTYPES),
        default='auto',
        help='dtype of the weights (%(default)s: that of the imported model, or bfloat16)',
    )
    exporter.add_argument('--max-shard-size', default='1GB', help='maximum size of a file, e.g. 500MB (%(default)s)')
    adapter = command(
        'export-adapter',
        'writes the adapters of a checkpoint for PEFT',
        '--checkpoint=runs/lora --output=adapter --base=Qwen/Qwen3-0.6B',
    )
    adapter.add_shared('--checkpoint')
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
            choices=('auto', *get_args(ArchitectureName)),
            default=ExportConfig.architecture,
            help='Transformers architecture (%(default)s: the one of its family, else one that can express the model; '
            'never nanochat, which vLLM does not support)',
        )
    single = command(
        'export-gguf',
        'writes a checkpoint as one GGUF file for llama.cpp',
        '--checkpoint=runs/qwen3 --output=qwen3.gguf --dtype=q8_0',
    )
    single.add_shared('--checkpoint')
    single.add_argument('--output', type=PathOption(Kind.FILE), required=True, help='new file')
    single.add_argument('--dtype', choices=GGUF_DTYPES, default='f16', help='dtype of the matrices (%(default)s)')
    nanochat = command(
        'export-nanochat',
        'writes a checkpoint as the files of nanochat',
        '--checkpoint=runs/d12 --output=base_checkpoints/d12',
    )
    nanochat.add_shared('--checkpoint')
    nanochat.add_argument('--output', type=local, required=True, help='new directory')
    nanochat.add_argument(
        '--dtype', choices=SAFETENSORS_DTYPES, default='float32', help='dtype of the weights (%(default)s)'
    )
    return parser


if __name__ == '__main__':
    run('hf')
