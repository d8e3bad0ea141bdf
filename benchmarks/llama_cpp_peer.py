"""llama.cpp's side of `benchmarks.decode_peers`, in a separate process: arguments FILE.gguf THREADS SLOTS.

Needs only llama-cpp-python and NumPy, so that it can run in another environment than maxlm.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as llama
import numpy as np

CONTEXT = 512


def main(file: str, threads: int, slots: int) -> None:
    """Loads a model and continues prompts on request until stdin ends."""
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx = CONTEXT * slots
    settings.n_seq_max = slots
    settings.n_threads = settings.n_threads_batch = threads
    context = llama.llama_init_from_model(model, settings)
    if not context:
        raise SystemExit(f'llama.cpp cannot load {file}')
    system = llama.llama_print_system_info().decode()
    print(json.dumps({'llama-cpp-python': llama_cpp.__version__, 'system': system, 'threads': threads}), flush=True)
    for line in sys.stdin:
        print(json.dumps(work(model, context, **json.loads(line))), flush=True)


def work(model: Any, context: Any, prompts: list[list[int]], num: int) -> dict[str, Any]:
    """Continues prompts greedily by `num` tokens, all at the same time."""
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    batch = llama.llama_batch_init(max(map(len, prompts)) + len(prompts), 0, 1)
    start = time.perf_counter()

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Returns the most likely token after each row (token, position, sequence, True)."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, is_last) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = sequence, is_last
        if llama.llama_decode(context, batch):
            raise SystemExit('llama_decode failed')
        pointers = (llama.llama_get_logits_ith(context, index) for index, row in enumerate(rows) if row[3])
        return [int(np.argmax(np.ctypeslib.as_array(pointer, (size,)))) for pointer in pointers]

    tokens = []
    for sequence, prompt in enumerate(prompts):
        last = len(prompt) - 1
        tokens.append(decode([(token, index, sequence, index == last) for index, token in enumerate(prompt)]))
    for step in range(num - 1):
        rows = [
            (row[-1], len(prompt) + step, k, True) for k, (row, prompt) in enumerate(zip(tokens, prompts, strict=True))
        ]
        for row, token in zip(tokens, decode(rows), strict=True):
            row.append(token)
    seconds = time.perf_counter() - start
    llama.llama_batch_free(batch)
    return {'tokens': tokens, 'seconds': seconds}


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
