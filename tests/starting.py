"""Workdirs with an untrained model from which runs start."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from maxlm.checkpoint.manager import Checkpoints
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.training.state import init_state
from maxlm.workdir.files import write_run_files
from tests.small import VOCAB, small_config, small_layout

# Model settings, which must match those of the run.
MODEL = {
    'model__family': 'llama',
    'model__num_layers': 1,
    'model__dim': 16,
    'model__num_heads': 2,
    'model__ffn_dim': 32,
    'model__tie_embeddings': True,
}


def make_start(workdir: Path, tokenizer: Path, *, vocab_size: int = 0, seed: int = 0, **overrides: Any) -> None:
    """Writes checkpoint 5 of a random model with `vocab_size` ids (0: the tokenizer's), its config and tokenizer."""
    vocab_size = vocab_size or Tokenizer.load(tokenizer).vocab_size
    settings = {**MODEL, 'model__vocab_size': max(vocab_size, VOCAB), 'train__seed': seed, **overrides}
    config = small_config(**settings)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    state = init_state(config, small_layout(config))
    with Checkpoints(workdir, max_to_keep=1) as checkpoints:
        checkpoints.save(5, state._replace(step=state.step + 5), {})
        checkpoints.wait()
    write_run_files(workdir, config, tokenizer)
