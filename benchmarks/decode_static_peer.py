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
    start = task.context // 2

    def step(tokens_BT: Any, positions_T: Any) -> Any:
        positions_BT = positions_T.expand(task.slots, -1)
        output = model(tokens_BT, past_key_values=cache, cache_position=positions_T, position_ids=positions_BT)
        return output.logits[:, -1:].argmax(-1)

    with torch.no_grad():
        prompt_BT = torch.randint(config.vocab_size, (task.slots, start), device=device)
        token_B1 = step(prompt_BT, torch.arange(start, device=device)).clone()
        decode = step if task.mode == 'none' else torch.compile(step, mode=task.mode, fullgraph=True)
        seconds = []
        # The first calls compile and record the graph. Later positions are as fast, as a pass reads the whole cache.
        for number in range(-(-task.passes // PASSES_PER_CALL) + 3):
            _synchronize(device)
            begin = time.perf_counter()
            for index in range(PASSES_PER_CALL):
                offset = (number * PASSES_PER_CALL + index) % (task.context - start)
                # A graph writes its result to the same memory each time.
                token_B1 = decode(token_B1, torch.tensor([start + offset], device=device)).clone()
            _synchronize(device)
            seconds.append((time.perf_counter() - begin) / PASSES_PER_CALL)
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
