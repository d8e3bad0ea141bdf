"""One side of `benchmarks.decode_peers`, in a separate process: arguments SIDE CHECKPOINT [QUANTIZE]."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Continues prompts greedily by a number of tokens and returns the new tokens of each.
Continue = Callable[[list[list[int]], int], list[list[int]]]


def maxlm(checkpoint: str, quantize: str) -> Continue:
    """Returns the engine of `maxlm generate`, with one slot for each prompt."""
    from maxlm.inference.engine.engine import Engine
    from maxlm.inference.engine.requests import Request
    from maxlm.inference.load import load_model
    from maxlm.inference.sampling import Sampling
    from maxlm.runtime.malloc import disable_malloc_trim

    disable_malloc_trim()
    model = load_model(checkpoint, num_devices=1, quantize=quantize)
    engines: dict[int, Engine] = {}

    def run(prompts: list[list[int]], num: int) -> list[list[int]]:
        if len(prompts) not in engines:
            engines[len(prompts)] = Engine(model, num_slots=len(prompts))
        greedy = Sampling(temperature=0)
        requests = [Request(tuple(prompt), num, greedy, ignore_eos=True) for prompt in prompts]
        return [[*samples[0].ids] for samples in engines[len(prompts)].complete(requests)]

    return run


def transformers(checkpoint: str, _: str) -> Continue:
    """Returns generation by Transformers in float32."""
    from transformers import AutoModelForCausalLM

    from benchmarks.serve_peer import work

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype='float32').eval()

    def run(prompts: list[list[int]], num: int) -> list[list[int]]:
        tokens: list[list[int]] = work(model, prompts, len(prompts), [num] * len(prompts))['tokens']
        return tokens

    return run


SIDES: dict[str, Callable[[str, str], Continue]] = {'maxlm': maxlm, 'transformers': transformers}


def main(side: str, checkpoint: str, quantize: str = '') -> None:
    """Loads a model and continues prompts on request until stdin ends."""
    run = SIDES[side](checkpoint, quantize)
    print(json.dumps({'threads': len(os.sched_getaffinity(0))}), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        start = time.perf_counter()
        tokens = run(asked['prompts'], asked['num'])
        print(json.dumps({'tokens': tokens, 'seconds': time.perf_counter() - start}), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
