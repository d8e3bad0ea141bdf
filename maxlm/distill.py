"""Stores a teacher's outputs: `python -m maxlm.distill --data=data/a --teacher=runs/a --output=data/a-teacher`.

The teacher runs over all training windows of the data set once. A run with --config.distill.logits_dir=OUTPUT then
learns from its most likely tokens, without running the teacher. To resume, run the same command again.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import jax

from maxlm.config.schema import DataConfig
from maxlm.data.loader.dataset import TrainingData, open_training_data
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code
from maxlm.formatting import format_bytes
from maxlm.hints import print_next
from maxlm.inference.load import LoadedModel, load_model
from maxlm.inference.teacher_pass import store_teacher_outputs, teacher_manifest
from maxlm.log import Console
from maxlm.runtime.compilation_cache import enable_compilation_cache
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Writes the outputs of the teacher and prints their size."""
    options = _parser().parse_args(argv)
    for name, lowest in (('top_k', 1), ('seq_len', 2), ('batch_size', 1)):
        if getattr(options, name) < lowest:
            flag = f'--{name.replace("_", "-")}'
            raise InputError(f'{flag}={getattr(options, name)}: must be at least {lowest}')
    if not 0.01 <= options.temperature <= 1000:
        raise InputError(f'--temperature={options.temperature:g}: must be at least 0.01 and at most 1000')
    with Console():
        data = dataclasses.replace(
            DataConfig(), path=options.data, seq_len=options.seq_len, document_mask=not options.no_document_mask
        )
        corpus = open_training_data(data, with_sources=False)
        model = load_model(options.teacher, num_devices=jax.device_count())
        _check(model, corpus, options)
        enable_compilation_cache(model.config.train.compilation_cache_dir)
        manifest = teacher_manifest(
            options.teacher, model, corpus, top_k=options.top_k, temperature=options.temperature
        )
        done = store_teacher_outputs(
            model, corpus, Path(options.output), manifest, batch_size=options.batch_size, show=not options.quiet
        )
    print(f'{done.directory}: {options.top_k} tokens of {done.windows:,} windows, {format_bytes(done.bytes)}')
    if not options.quiet:
        settings = {
            'data.path': options.data,
            'data.seq_len': options.seq_len,
            'data.document_mask': data.document_mask,
            'model.vocab_size': manifest.vocab_size,
            'distill.logits_dir': options.output,
            'distill.top_k': options.top_k,
            'distill.temperature': options.temperature,
        }
        print_next('maxlm', 'train', '--config=tiny', *(f'--config.{key}={value}' for key, value in settings.items()))
    return EXIT_DONE


def _check(model: LoadedModel, corpus: TrainingData, options: argparse.Namespace) -> None:
    """Raises InputError unless the data is complete and local and has the tokenizer of the teacher."""
    source, vocab_size = corpus.sources[0], model.config.model.vocab_size
    if source.url or source.is_growing:
        raise InputError(f'--data={options.data}: not a complete local data set; copy it to a disk')
    if Tokenizer.load(source.dataset.tokenizer_path).sha256 != model.tokenizer.sha256:
        raise InputError(
            f'--data={options.data}: has another tokenizer than the teacher; prepare the data with --tokenizer '
            f'{model.tokenizer_path}'
        )
    if options.top_k > vocab_size:
        raise InputError(f'--top-k={options.top_k}: the teacher has {vocab_size} tokens; set at most {vocab_size}')
    longest = model.config.model.max_positions
    if model.config.model.position_embedding == 'learned' and options.seq_len > longest:
        raise InputError(
            f'--seq-len={options.seq_len}: the teacher has learned positions for {longest} tokens; set at most '
            f'{longest}'
        )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog='maxlm distill',
        allow_abbrev=False,
        description=__doc__,
        epilog='example: python -m maxlm.distill --data=data/mine --teacher=runs/first --top-k=64 --seq-len=256 '
        '--output=data/mine-teacher',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    directory = PathOption(Kind.DIRECTORY)
    parser.add_argument('--data', type=directory, required=True, help='data set of maxlm.prepare')
    parser.add_argument(
        '--teacher',
        type=PathOption(Kind.DIRECTORY, ANY),
        required=True,
        help='checkpoint: workdir, WORKDIR@STEP or directory of one step',
    )
    parser.add_argument('--output', type=directory, required=True, help='directory to create or to complete')
    parser.add_argument('--top-k', type=int, default=64, help='tokens to store for each position (default: 64)')
    parser.add_argument(
        '--seq-len', type=int, default=1024, help='data.seq_len of the later run, in tokens (default: 1024)'
    )
    parser.add_argument(
        '--temperature', type=float, default=1.0, help='distill.temperature of the later run (default: 1)'
    )
    parser.add_argument('--no-document-mask', action='store_true', help='the later run has data.document_mask=False')
    parser.add_argument('--batch-size', type=int, default=16, help='sequences of a forward pass (default: 16)')
    parser.add_argument('--quiet', action='store_true', help='no progress and no next command')
    return parser


def run() -> None:
    """Entry point of `python -m maxlm.distill` and `maxlm distill`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
