"""Quantizes a checkpoint and compares the losses."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import jax

from maxlm.checkpoint.fetch import find_local_step
from maxlm.cli.hints import print_generate
from maxlm.data.loader.dataset import TrainingData, open_training_data
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_DONE, InputError
from maxlm.evaluation.validation import evaluate
from maxlm.formatting import format_bytes
from maxlm.inference.load import load_model
from maxlm.inference.quantize_checkpoint import Quantized, parse_weights, quantize_checkpoint
from maxlm.log import Console, progress_bar
from maxlm.training.step import make_eval_step
from maxlm.workdir.files import TOKENIZER, read_config


def execute(options: argparse.Namespace) -> int:
    """Writes the quantized model and prints sizes and losses before and after."""
    weights = parse_weights(options.format, options.group)
    with Console():
        # Open the data before anything is written, so that missing evaluation data is reported early.
        corpus = None if options.no_eval else _open_corpus(options.checkpoint, options.data)
        done = quantize_checkpoint(options.checkpoint, options.output, weights, show=True)
        losses = []
        if corpus is not None:
            both = options.checkpoint, str(done.workdir)
            losses = [_loss(checkpoint, corpus, options.num_batches) for checkpoint in both]
    print(_table(done, weights.kind, losses))
    print_generate(done.workdir)
    return EXIT_DONE


def _open_corpus(checkpoint: str, path: str | None) -> TrainingData:
    workdir = Path(find_local_step(checkpoint).parent.parent)
    data = read_config(workdir).data
    data = dataclasses.replace(data, path=path, sources=()) if path else data
    try:
        corpus = open_training_data(data, with_sources=False)
    except InputError as error:
        raise InputError(f'{error}; or give other data with --data, or skip the comparison with --no-eval') from error
    dataset = corpus.first
    if dataset.load_tokenizer().ids_sha256 != Tokenizer.load(workdir / TOKENIZER).ids_sha256:
        raise InputError(
            f'{dataset.tokenizer_path} is not the tokenizer that the model was trained with; '
            f'prepare the data with --tokenizer {workdir / TOKENIZER}, or skip the comparison with --no-eval'
        )
    num_tokens, _ = corpus.validation_counts
    if not num_tokens:
        raise InputError(
            f'{dataset.path} has no validation documents; prepare it with --validation PATH, or skip the comparison '
            f'with --no-eval'
        )
    return corpus


def _loss(checkpoint: str, corpus: TrainingData, num_batches: int) -> float:
    """Returns the loss of text in nats per token, even if the model was last trained on another objective."""
    model = load_model(checkpoint, num_devices=jax.device_count())
    config = dataclasses.replace(model.config, train=dataclasses.replace(model.config.train, objective='next_token'))
    global_batch = config.train.global_batch_size
    batches = corpus.validation_batches(global_batch, num_batches, model.layout.local_rows(global_batch))
    with (
        corpus.fetcher(None, 0),
        progress_bar('evaluate', total=len(batches), unit='batch', show=True) as bar,
    ):

        def read(index: int) -> dict:
            bar.update()
            return batches[index]

        step = jax.jit(make_eval_step(config, model.layout, len(corpus.names)))
        in_order = map(read, range(len(batches)))
        return evaluate(step, model.params, in_order, layout=model.layout, global_batch=global_batch).loss


def _table(done: Quantized, kind: str, losses: list[float]) -> str:
    rows = [['weights', 'in memory', 'on disk', 'loss', 'difference']]
    sizes = (('float32', done.memory_before, done.disk_before), (kind, done.memory_after, done.disk_after))
    for index, (name, memory, disk) in enumerate(sizes):
        loss = f'{losses[index]:.4f}' if losses else '-'
        difference = f'{100 * (losses[1] / losses[0] - 1):+.2f} %' if losses and index else ''
        rows.append([name, format_bytes(memory), format_bytes(disk), loss, difference])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f'{row[0]:<{widths[0]}}  '
        + '  '.join(f'{cell:>{width}}' for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return '\n'.join([f'{done.workdir}: step {done.step} quantized to {kind}', *(line.rstrip() for line in lines)])
