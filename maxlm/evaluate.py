"""Loss of a checkpoint on held-out data: `python -m maxlm.evaluate --checkpoint=CKPT [--data=DIR] [--json]`.

CKPT is a workdir (its newest step), `WORKDIR@STEP`, or one step's directory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import jax

from maxlm.data.corpus import open_corpus
from maxlm.data.tokenizer import Tokenizer
from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code
from maxlm.inference.load import load_model
from maxlm.runtime.compile_cache import keep_programs
from maxlm.runtime.console import Console, progress_bar
from maxlm.runtime.evaluation import evaluate
from maxlm.runtime.metrics import perplexity
from maxlm.training.step import make_eval_step


def main(argv: list[str]) -> int:
    """Prints loss, perplexity, bits per byte, and the unigram entropy that a model must beat."""
    parser = ArgumentParser(prog='maxlm.evaluate', allow_abbrev=False, description=__doc__)
    parser.add_argument('--checkpoint', required=True, help='workdir, WORKDIR@STEP, or a directory of one step')
    parser.add_argument('--data', help="data set of maxlm.prepare (default: the run's)")
    parser.add_argument('--num_batches', type=int, default=0, help='0 = the whole validation split (default)')
    parser.add_argument('--json', action='store_true', help='print one JSON object')
    options = parser.parse_args(argv)
    if options.num_batches < 0:
        raise InputError(f'--num_batches={options.num_batches}: must be at least 0 (0 = the whole split)')

    with Console():
        model = load_model(options.checkpoint, num_devices=jax.device_count())
    # Of text, whatever the model was trained on last.
    config = dataclasses.replace(model.config, train=dataclasses.replace(model.config.train, objective='next_token'))
    keep_programs(config.train.compile_cache)
    data = dataclasses.replace(config.data, path=options.data, sources=()) if options.data else config.data
    corpus = open_corpus(data, tell_sources=config.metrics.by_source)
    dataset = corpus.first
    # Not byte by byte: a file from elsewhere may be written in another way and mean the same.
    if Tokenizer.load(dataset.tokenizer_path).sha256 != model.tokenizer.sha256:
        raise InputError(
            f'{dataset.tokenizer_path} is not the tokenizer that the model was trained with; '
            f'prepare the data with --tokenizer {model.tokenizer_path}'
        )
    num_tokens, text_bytes = corpus.validation_counts
    if not num_tokens:
        raise InputError(f'{dataset.path} has no validation documents; prepare it with --validation PATH')
    batches = corpus.validation_batches(
        config.train.global_batch,
        options.num_batches,
        model.layout.local_rows(config.train.global_batch),
    )
    with (
        corpus.fetcher(None, 0),
        progress_bar(total=len(batches), initial=0, unit='batch', show=not options.json) as bar,
    ):

        def read(index: int) -> dict:
            bar.update()
            return batches[index]

        result = evaluate(
            jax.jit(make_eval_step(config, model.layout, len(corpus.names))),
            model.params,
            map(read, range(len(batches))),
            layout=model.layout,
            global_batch=config.train.global_batch,
        )
    values = {
        'step': model.step,
        'loss': result.loss,
        'perplexity': perplexity(result.loss),
        # Independent of the tokenizer: nats per token → bits per byte by the split's own ratio.
        # Of what came in as tokens nobody knows the bytes.
        'bits_per_byte': result.loss / math.log(2) * num_tokens / text_bytes if text_bytes else None,
        'unigram_entropy': corpus.unigram_entropy,
        'tokens': result.tokens,
        **({'by_source': dict(zip(corpus.names, result.source_losses, strict=True))} if corpus.names else {}),
    }
    if options.json:
        print(json.dumps(values))
    else:
        bits = '' if values['bits_per_byte'] is None else f'{values["bits_per_byte"]:.3f} bits/byte '
        print(
            f'step {model.step}: loss {result.loss:.4f} nats/token, perplexity {values["perplexity"]:.2f}, '
            f'{bits}over {result.tokens:,} tokens; '
            f'unigram entropy of the data {corpus.unigram_entropy:.4f} nats/token'
        )
        for name, loss in zip(corpus.names, result.source_losses, strict=True):
            print(f'  {name}: loss {loss:.4f}')
    return EXIT_DONE


def run() -> None:
    """Entry of `python -m maxlm.evaluate` and `maxlm evaluate`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
