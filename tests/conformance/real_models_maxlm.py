"""Runs real models on maxlm's Python API and writes JSON: `python -m tests.conformance.real_models_maxlm …`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import maxlm
from maxlm.inference.prompts import chat_prompt, text_prompt
from tests.conformance.real_models_prompts import LOSS_TEXT, requests


def answers(checkpoint: str, output: str) -> None:
    """Writes ids, greedy continuations, logits after each prompt, the stop tokens, and the loss of a text."""
    model = maxlm.load(checkpoint)
    loaded = model._model
    rows, logits = [], []
    for request in requests(has_template=loaded.chat is not None):
        prompt = request.get('text', request.get('messages'))
        ids = text_prompt(model.tokenizer, prompt) if isinstance(prompt, str) else chat_prompt(loaded, prompt)
        text = ''.join(model.stream(prompt, max_tokens=request['max_tokens'], temperature=0))
        rows.append({'ids': [int(i) for i in ids], 'text': text})
        logits.append(model.logits(ids)[-1])
    stops = sorted({int(i) for i in loaded.stop_token_ids})
    _write(output, {'requests': rows, 'loss': model.loss(LOSS_TEXT), 'stops': stops})
    np.save(Path(output).with_suffix('.npy'), np.stack(logits))


def loss(checkpoint: str, quantize: str, output: str) -> None:
    """Writes the loss of a text with quantized kernels."""
    _write(output, {'loss': maxlm.load(checkpoint, quantize=quantize).loss(LOSS_TEXT)})


def _write(path: str, content: object) -> None:
    Path(path).write_text(json.dumps(content, ensure_ascii=False))


if __name__ == '__main__':
    {'answers': answers, 'loss': loss}[sys.argv[1]](*sys.argv[2:])
