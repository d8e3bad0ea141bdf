"""Measures the loss of a model whose kernels are quantized while loading: `python -m benchmarks.quantized_loss
--checkpoint=runs/a --text=FILE --output=FILE`.

The engine scores windows of the text with the weights of each format. With w8a8 and w4a8 it also rounds the inputs of
the kernels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.config.sections.quantization import QUANTIZATION_GROUPS, ROUNDED_INPUTS
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Delta, Request
from maxlm.inference.load import load_model
from maxlm.inference.sampling import Sampling
from maxlm.log import progress_bar

WINDOW = 512


def main(argv: list[str]) -> int:
    """Measures all formats, and prints and writes their losses."""
    parser = ArgumentParser(prog='benchmarks.quantized_loss', allow_abbrev=False, description=__doc__)
    parser.add_argument('--checkpoint', required=True, help='workdir with float32 weights')
    parser.add_argument('--text', type=Path, required=True, help='file of text')
    parser.add_argument('--text-name', default='', help='source and license of the text, for the output')
    parser.add_argument('--windows', type=int, default=16, help=f'windows of {WINDOW} tokens (default 16)')
    parser.add_argument('--output', type=Path, required=True, help='JSON file to write')
    options = parser.parse_args(argv)
    text, losses = options.text.read_text(), {}
    formats = ('', *QUANTIZATION_GROUPS, *ROUNDED_INPUTS)
    with progress_bar('quantized loss', total=len(formats), unit='format', show=True) as bar:
        for name in formats:
            losses[name or 'float32'] = loss(options.checkpoint, name, text, options.windows)
            bar.update()
    base = losses['float32']
    found = {
        'machine': machine(),
        'model': Path(options.checkpoint).name,
        'text': options.text_name or options.text.name,
        'tokens': options.windows * (WINDOW - 1),
        'nats_per_token': losses,
        'relative_difference': {name: value / base - 1 for name, value in losses.items() if name != 'float32'},
    }
    options.output.write_text(json.dumps(found, indent=1) + '\n')
    for name, value in losses.items():
        print(f'{name}: {value:.4f} nats per token ({value / base - 1:+.2%})')
    return EXIT_DONE


def loss(checkpoint: str, quantize: str, text: str, num_windows: int) -> float:
    """Returns the mean loss in nats of the tokens of the windows, except the first of each."""
    model = load_model(checkpoint, num_devices=1, quantize=quantize)
    (ids,) = model.tokenizer.encode_batch([text])
    if len(ids) < num_windows * WINDOW:
        raise InputError(f'--text: has {len(ids)} tokens, but {num_windows} windows need {num_windows * WINDOW}')
    engine = Engine(model, num_slots=1, max_context=WINDOW + 1, chunk=WINDOW)
    windows = [ids[start : start + WINDOW] for start in range(0, num_windows * WINDOW, WINDOW)]
    deltas: list[Delta] = []
    for window in windows:
        engine.submit(
            Request(tuple(map(int, window)), 0, Sampling(), top_log_probs=0, score_prompt=True), deltas.append
        )
    while engine.step():
        pass
    scores = [delta.prompt_scores.log_prob_T for delta in deltas if delta.prompt_scores is not None]
    total = -float(sum(values.sum() for values in scores))
    return total / (num_windows * (WINDOW - 1))


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
