"""Provides workdirs with one checkpoint of random parameters, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from maxlm.checkpoint.streaming import StreamedArray, write_step
from maxlm.config.schema import Config
from maxlm.config.serialization import to_json
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer
from maxlm.huggingface.config_conversion import choose_architecture
from maxlm.huggingface.export_model import MAX_SHARD_BYTES, export_model
from maxlm.huggingface.state_dict import parameter_shapes, tensors
from tests.huggingface.expert_models import EXPERT_MODELS
from tests.small import LATENT, model_keys, small_config

# Overrides of a small model by name. Models of one family differ as far as possible.
MODELS: dict[str, dict[str, Any]] = {
    'gpt2': model_keys(family='gpt2', ffn_dim=40),
    'gpt_neox': model_keys(family='gpt_neox'),
    'llama': model_keys(family='llama', num_kv_heads=2, head_dim=12, ffn_dim=40),
    'mistral': model_keys(family='llama', attention_pattern='S', sliding_window=5, tie_embeddings=True),
    'qwen3': model_keys(
        family='qwen3',
        num_layers=3,
        num_kv_heads=1,
        attention_pattern='SL',
        sliding_window=6,
        rope_scaling='yarn',
        rope_scaling_factor=4.0,
    ),
    'qwen2': model_keys(family='qwen2', tie_embeddings=True),
    'smollm3': model_keys(family='smollm3', attention_pattern='NL'),
    'olmo2': model_keys(family='olmo2', num_kv_heads=2),
    'olmo3': model_keys(
        family='olmo3', attention_pattern='SL', sliding_window=6, rope_scaling='yarn', rope_scaling_factor=4.0
    ),
    # Untied, because the scaled embedding of a tied output repeats the last token.
    'granite': model_keys(family='granite', tie_embeddings=False),
    'phi3': model_keys(family='phi3', partial_rotary_factor=0.5),
    'gemma2': model_keys(family='gemma2', sliding_window=6),
    'gemma3': model_keys(family='gemma3', num_layers=3, attention_pattern='SSL', sliding_window=6),
    **{f'{name} with experts': overrides for name, overrides in EXPERT_MODELS.items()},
    'deepseek_v3': {**LATENT, 'model__family': 'deepseek_v3', 'model__q_lora_rank': 20},
    'starcoder2': model_keys(family='starcoder2', num_kv_heads=2, sliding_window=6),
    'nanochat': model_keys(family='nanochat'),
}


def parameters(config: Config, architecture: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random parameters by dotted path, of a size that preserves the signal."""
    rng = np.random.default_rng(seed)
    shapes = parameter_shapes(tensors(architecture, config.model))

    def random(path: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape, np.float32)
        # Scales are close to 1 and other parameters close to 0, so that no bias alone decides the most likely token.
        return noise * np.float32(0.3) + np.float32(path.endswith('scale'))

    return {path: random(path, shape) for path, shape in shapes.items()}


def make_exported(folder: Path, overrides: dict[str, Any]) -> tuple[Path, Path]:
    """Writes a workdir and its export in float32 into a folder, and returns both."""
    run, exported = folder / 'run', folder / 'exported'
    make_workdir(run, overrides)
    export_model(
        str(run), str(exported), architecture='auto', dtype='float32', max_shard_size=MAX_SHARD_BYTES, show=False
    )
    return run, exported


def make_workdir(
    workdir: Path,
    overrides: dict[str, Any],
    *,
    seed: int = 0,
    step: int = 0,
    tokenizer: Tokenizer | None = None,
    changed: dict[str, np.ndarray] | None = None,
) -> Config:
    """Writes a workdir of a small resolved model for `tokenizer`. `changed` replaces parameters."""
    tokenizer = tokenizer or bytes_tokenizer()
    overrides = {'model__vocab_size': tokenizer.vocab_size + 3, 'data__seq_len': 64, **overrides}
    config = small_config(**overrides)
    family = config.model.family
    architecture = choose_architecture(config.model, 'nanochat' if family == 'nanochat' else 'auto').model_type
    arrays = parameters(config, architecture, seed) | (changed or {})
    workdir.mkdir(parents=True)
    (workdir / 'config.json').write_text(to_json(config))
    tokenizer.save(workdir / 'tokenizer.json')

    def streamed(path: str) -> StreamedArray:
        array, stacked = arrays[path], path.startswith(('blocks.', 'dense_blocks.'))
        return StreamedArray(array.shape, lambda layer: array if layer is None else array[layer], stacked)

    write_step(workdir, step, {path: streamed(path) for path in arrays})
    return config
