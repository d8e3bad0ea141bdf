"""Computes the expected values of real models with Transformers and PEFT: `python -m … COMMAND ARGUMENTS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tests.conformance.real_models_prompts import DOCUMENT, LOSS_TEXT, TUNING, WINDOW, requests


def convert(gguf: str, output: str) -> None:
    """Writes a GGUF file, dequantized to float32, in the format of Transformers."""
    directory, name = str(Path(gguf).parent), Path(gguf).name
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
    # The weights are no longer quantized, which Transformers does not notice.
    model.is_quantized, model.hf_quantizer = False, None
    del model.config.quantization_config
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def answers(directory: str, output: str) -> None:
    """Writes ids, greedy continuations, logits after each prompt, and the loss of a text."""
    model, tokenizer = _load(directory)
    rows, logits = [], []
    for request in requests(has_template=tokenizer.chat_template is not None):
        ids = _prompt_ids(tokenizer, request)
        with torch.inference_mode():
            done = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=request['max_tokens'],
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        new = done.sequences[0, len(ids) :].tolist()
        best = torch.cat(done.logits).topk(2).values
        eos = model.generation_config.eos_token_id
        stops = eos if isinstance(eos, list) else [eos]
        is_stopped = new[-1] in stops
        rows.append(
            {
                'ids': ids,
                'text': tokenizer.decode(new[:-1] if is_stopped else new),
                'is_stopped': is_stopped,
                'completion_tokens': len(new),
                # Programs that round differently may choose different tokens where the two best are nearly equal.
                'smallest_margin': float((best[:, 0] - best[:, 1]).min()),
            }
        )
        logits.append(done.logits[0][0].numpy())
    loss, tokens = text_loss(model, tokenizer, LOSS_TEXT)
    _write(output, {'requests': rows, 'loss': loss, 'loss_tokens': tokens, 'stops': sorted(stops)})
    np.save(Path(output).with_suffix('.npy'), np.stack(logits))


def text_loss(model: Any, tokenizer: Any, text: str) -> tuple[float, int]:
    """Returns the mean cross-entropy of the tokens of a text, and their number.

    The first token is predicted from the beginning of text if the tokenizer adds one, otherwise from the end of text.
    """
    ids = tokenizer(text).input_ids
    if ids[0] != tokenizer.bos_token_id:
        ids = [tokenizer.eos_token_id, *ids]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item(), len(ids) - 1


def tuning_loss(directory: str, output: str) -> None:
    """Writes the loss of new LoRA adapters: of the answers of TUNING, or of a window of DOCUMENT without a template."""
    model, tokenizer = _load(directory)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules='all-linear', task_type='CAUSAL_LM')).eval()
    if tokenizer.chat_template is None:
        ids = [*tokenizer(DOCUMENT).input_ids, tokenizer.eos_token_id][: WINDOW + 1]
        assert len(ids) == WINDOW + 1
        rows = [(ids, range(1, len(ids)))]
    else:
        rows = [_answers_of(tokenizer, messages) for messages in TUNING]
    losses = []
    for ids, targets in rows:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        each = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction='none')
        losses += [each[index - 1].item() for index in targets]
    _write(output, {'loss': float(np.mean(losses)), 'targets': len(losses)})


def _answers_of(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Returns the ids of a conversation, and the indices of answers with their end of turn."""

    def ids_of(count: int, **options: bool) -> list[int]:
        return tokenizer.apply_chat_template(messages[:count], return_dict=False, **options)

    targets: list[int] = []
    for number, message in enumerate(messages):
        if message['role'] == 'assistant':
            start, stop = len(ids_of(number, add_generation_prompt=True)), len(ids_of(number + 1))
            ids = ids_of(number + 1)
            # Text after the end of turn, such as a line break, is no part of an answer.
            stop = max(index for index in range(start, stop) if ids[index] == tokenizer.eos_token_id) + 1
            targets += range(start, stop)
    return ids_of(len(messages)), targets


def _load(directory: str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation='sdpa').eval()
    return model, AutoTokenizer.from_pretrained(directory)


def _prompt_ids(tokenizer: Any, request: dict[str, Any]) -> list[int]:
    if 'text' in request:
        return tokenizer(request['text']).input_ids
    return tokenizer.apply_chat_template(request['messages'], add_generation_prompt=True, return_dict=False)


def _write(path: str, content: Any) -> None:
    Path(path).write_text(json.dumps(content, ensure_ascii=False))


if __name__ == '__main__':
    logging.set_verbosity_error()
    {'convert': convert, 'answers': answers, 'tuning_loss': tuning_loss}[sys.argv[1]](*sys.argv[2:])
