"""Transformers' side of `benchmarks.serve`: creates a model, then answers JSON lines on stdin with JSON lines."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from maxlm.data.tokenizer.tokenizer import make_tokenizer


def write_llama(directory: Path, sizes: dict[str, int], *, end: int) -> Any:
    """Writes a Llama with random weights in Transformers' format and returns it; `end` is the end-of-document id."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=sizes['vocab'],
        hidden_size=sizes['dim'],
        intermediate_size=sizes['ffn'],
        num_hidden_layers=sizes['layers'],
        num_attention_heads=sizes['heads'],
        max_position_embeddings=sizes['context'],
        # A large spread separates the probabilities, so that rounding does not decide the most likely token.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=end,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def main(directory: Path, sizes: dict[str, int]) -> None:
    """Writes a model with a tokenizer, reports it, and generates on request until stdin ends."""
    model = write_llama(directory, sizes, end=0)
    # Tokens decode to their numbers, because their text does not matter here.
    make_tokenizer(f'ids:{sizes["vocab"]}:0', []).save(directory / 'tokenizer.json')
    print(json.dumps({'parameters': model.num_parameters()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(work(model, **json.loads(line))), flush=True)


class _FirstToken(transformers.StoppingCriteria):
    """Stopping criterion that records the time of the first token and never stops."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.time = self.time or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def work(model: Any, prompts: list[list[int]], batch: int, nums: list[int]) -> dict[str, Any]:
    """Generates greedy responses of `nums` tokens in left-padded batches of `batch` prompts."""
    tokens: list[list[int]] = []
    first: list[float] = []
    start = time.perf_counter()
    for begin in range(0, len(prompts), batch):
        part = prompts[begin : begin + batch]
        longest, num = max(map(len, part)), max(nums[begin : begin + batch])
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in part])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in part])
        noted = _FirstToken()
        with torch.inference_mode():
            rows = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([noted]),
            )
        answers = rows[:, longest:].tolist()
        tokens += [answer[:wanted] for answer, wanted in zip(answers, nums[begin : begin + batch], strict=True)]
        first += [noted.time - start] * len(part)
    return {'tokens': tokens, 'first': first, 'seconds': time.perf_counter() - start}


if __name__ == '__main__':
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
