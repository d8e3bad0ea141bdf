"""Runs one of two processes that sample responses together: `python -m tests.rl.rollout_pair`.

These processes and the single-process tests use the same model and prompts.
"""

from __future__ import annotations

import json

from maxlm.parallel.layout import make_layout
from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.runtime.initialize import initialize
from tests.parameters import random_params
from tests.small import small_config

MAX_PROMPT, MAX_TOKENS, NUM_SAMPLES = 8, 7, 2
PROMPTS = [[7], [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
# An odd size, which devices cannot split equally.
SETTINGS = {'model__vocab_size': 61}
STD = 0.3


def main() -> None:
    """Prints the results of this process as JSON in the last line."""
    initialize()
    config = small_config(2, **SETTINGS, mesh__fsdp=2)
    layout = make_layout(config.mesh)
    sampler = Sampler(config, layout, ends=(), max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS)
    responses = sampler(random_params(config, layout, std=STD), PROMPTS, seed=0, num_samples=NUM_SAMPLES)
    print(json.dumps({'tokens': responses.tokens_BR.tolist(), 'log_probs': responses.log_probs_BR.tolist()}))


if __name__ == '__main__':
    main()
