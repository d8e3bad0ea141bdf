"""Reduces a config to a size that a CPU trains in seconds, to try all phases of a recipe."""

from __future__ import annotations

from ml_collections import ConfigDict

SEQ_LEN = 128
STEPS = 10


def shrink(config: ConfigDict) -> ConfigDict:
    """Returns the config with two narrow layers, short sequences and 10 steps; it is modified in place.

    The family, the objective, the optimizer, the schedules and the phases stay those of the recipe. The vocabulary is
    that of the data set.
    """
    model, data, train = config.model, config.data, config.train
    num_groups = model.num_heads // model.num_kv_heads if model.num_kv_heads else 1
    model.num_layers = 2
    model.dim = 64
    model.num_heads = 4
    model.num_kv_heads = max(1, 4 // num_groups)
    model.head_dim = 0
    if model.kv_lora_rank:
        model.num_kv_heads = 0
        model.kv_lora_rank = 32
        model.q_lora_rank = min(model.q_lora_rank, 48)
        model.qk_nope_head_dim = model.v_head_dim = 16
        model.qk_rope_head_dim = 8
    model.ffn_dim = 128
    model.vocab_size = 0
    model.max_positions = 0
    model.dtype = 'float32'
    model.remat_policy = 'none'
    model.scan_layers = False

    data.seq_len_schedule = tuple((SEQ_LEN * length // data.seq_len, end) for length, end in data.seq_len_schedule)
    data.seq_len = SEQ_LEN

    train.num_steps = STEPS
    train.num_tokens = 0
    train.num_epochs = train.hours = train.dollars = 0.0
    train.global_batch_size = 8
    train.global_batch_size_tokens = 0
    train.per_device_batch_size = 0
    train.log_every = 5

    config.eval.interval = STEPS // 2
    config.eval.num_batches = 1
    config.eval.num_samples = 1
    config.eval.sample_max_tokens = 8

    config.optimizer.warmup_steps = 1
    config.optimizer.warmup_tokens = 0

    config.checkpoint.save_interval_steps = STEPS // 2
    return config


def shrink_rollouts(config: ConfigDict) -> ConfigDict:
    """Returns a config of `shrink` for GRPO with a few short responses; it is modified in place."""
    config.train.num_steps = 4
    config.train.global_batch_size = 16
    config.grpo.num_generations = 4
    config.grpo.prompts_per_rollout = 4
    config.grpo.max_completion_length = 16
    config.eval.interval = 0
    return config
