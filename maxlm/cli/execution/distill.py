"""Runs a teacher over a data set and stores its outputs."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import jax

from maxlm.cli.hints import print_next
from maxlm.config.schema import DataConfig
from maxlm.data.loader.dataset import TrainingData, open_training_data
from maxlm.errors import EXIT_DONE, InputError
from maxlm.formatting import format_bytes
from maxlm.inference.load import LoadedModel, load_model
from maxlm.inference.teacher_pass import store_teacher_outputs, teacher_manifest
from maxlm.log import Console


def execute(options: argparse.Namespace) -> int:
    """Writes the outputs of the teacher and prints their size."""
    with Console():
        data = dataclasses.replace(
            DataConfig(), path=options.data, seq_len=options.seq_len, document_mask=not options.no_document_mask
        )
        corpus = open_training_data(data, with_sources=False)
        model = load_model(options.teacher, num_devices=jax.device_count())
        _check(model, corpus, options)
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
    if source.dataset.load_tokenizer().ids_sha256 != model.tokenizer.ids_sha256:
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
