"""Transformers' side of `benchmarks.decode`, in a separate process: one argument, a `Task` as a JSON object.

Decodes greedily with a static cache. On a GPU, `torch.compile` with CUDA graphs (`reduce-overhead`) compiles the step.
Prints a JSON line with the median time of a pass.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
import transformers

# Passes between two times that are measured: as many as maxlm runs in a call.
PASSES_PER_CALL = 8


class Task(NamedTuple):
    """Work of the process.

    Attributes:
        config: content of config.json.
        slots: number of sequences.
        context: positions of a sequence, half of which the prompt fills.
        passes: number of passes that count.
        dtype: name of the compute dtype.
        mode: mode of `torch.compile`, or none.
    """

    config: dict[str, Any]
    slots: int
    context: int
    passes: int
    dtype: str
    mode: str


def main(task: Task) -> dict[str, Any]:
    """Returns the median seconds of a pass and the versions."""
    torch.manual_seed(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    fields = {name: value for name, value in task.config.items() if name != 'model_type'}
    config = transformers.AutoConfig.for_model(task.config['model_type'], **fields)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, task.dtype))
    model = model.to(device).eval()
    cache = transformers.StaticCache(config=config, max_cache_len=task.context)

    def step(tokens_BT: Any) -> Any:
        return model(tokens_BT, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    half = task.context // 2
    with torch.no_grad():
        token_B1 = step(torch.randint(config.vocab_size, (task.slots, half), device=device)).clone()
        decode = step if task.mode == 'none' else torch.compile(step, mode=task.mode, fullgraph=True)
        seconds, left = [], task.context - half
        # The first calls compile and record the graph.
        for _ in range(-(-task.passes // PASSES_PER_CALL) + 3):
            if left < PASSES_PER_CALL:
                # A pass reads the whole cache, so that an empty one is as fast.
                cache.reset()
                left = task.context
            left -= PASSES_PER_CALL
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(PASSES_PER_CALL):
                # A graph writes its result to the same memory each time.
                token_B1 = decode(token_B1).clone()
            _synchronize(device)
            seconds.append((time.perf_counter() - start) / PASSES_PER_CALL)
    return {
        'pass_seconds': statistics.median(seconds[3:]),
        'mode': task.mode,
        'torch': torch.__version__,
        'transformers': transformers.__version__,
    }


def _synchronize(device: str) -> None:
    if device == 'cuda':
        torch.cuda.synchronize()


if __name__ == '__main__':
    print(json.dumps(main(Task(**json.loads(sys.argv[1])))))
