"""Continues prompts with llama.cpp: `python -m tests.conformance.real_models_llama_cpp GGUF REQUESTS OUTPUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import xllamacpp

CONTEXT = 2048


def main(gguf: str, requests: str, output: str) -> None:
    """Writes the greedy continuation of each request, and the number of its prompt tokens."""
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # The default cache of keys and values rounds to float16.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    answers = [_answer(server, request) for request in json.loads(Path(requests).read_text())]
    Path(output).write_text(json.dumps(answers, ensure_ascii=False))


def _answer(server: Any, request: dict[str, Any]) -> dict[str, Any]:
    common = {'max_tokens': request['max_tokens'], 'temperature': 0.0, 'cache_prompt': False}
    if 'text' in request:
        done = server.handle_completions({'prompt': request['text'], **common})
        text = done['choices'][0]['text']
    else:
        done = server.handle_chat_completions({'messages': request['messages'], **common})
        text = done['choices'][0]['message']['content']
    return {'text': text, 'prompt_tokens': done['usage']['prompt_tokens']}


if __name__ == '__main__':
    main(*sys.argv[1:])
