"""Ranges of all numeric config keys."""

from __future__ import annotations

import math
from typing import NamedTuple

from maxlm.config.schema import AUTO, MESH_AXES, Config
from maxlm.errors import InputError


class Range(NamedTuple):
    """Range of finite values that a key accepts.

    Attributes:
        low, high: smallest and largest value.
        above, below: exclude `low` or `high` itself.
        or_zero: 0 is also allowed.
    """

    low: float
    high: float
    above: bool = False
    below: bool = False
    or_zero: bool = False

    def __contains__(self, value: object) -> bool:
        """Returns True if a number is in the range. NaN and infinities are not."""
        assert isinstance(value, (int, float)), value
        if self.or_zero and value == 0:
            return True
        # Comparisons with NaN are false.
        from_low = value > self.low if self.above else value >= self.low
        return from_low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f'{"greater than" if self.above else "at least"} {_shown(self.low)}'
        zero = ', or 0' if self.or_zero else ''
        return f'{low} and {"below" if self.below else "at most"} {_shown(self.high)}{zero}'


# Step numbers, token ids and positions are 32-bit integers on the devices.
INT32 = 2**31 - 1
# Random generators take 32-bit seeds.
SEED = Range(0, 2**32 - 1)
STEPS = Range(0, INT32)
STEPS_FROM_1 = Range(1, INT32)
TOKENS = Range(0, 10**18)
# All published recipes use rates far below 1 per step.
RATE = Range(0, 100)
WEIGHT = Range(0, 1000)
FRACTION = Range(0, 1)
FRACTION_BELOW_1 = Range(0, 1, below=True)
FRACTION_ABOVE_0 = Range(0, 1, above=True)
# Added to a square root or a variance; smaller values are 0 in float32.
EPSILON = Range(1e-30, 1)
# Number of turns and scale factors of rotary positions.
TURNS = Range(0, 1e5, above=True)
MULTIPLIER = Range(1e-4, 1e5)
COUNT = Range(0, 10**5)
COUNT_FROM_1 = Range(1, 10**5)
# Threads and processes on one machine.
WORKERS = Range(0, 1024)
WORKERS_FROM_1 = Range(1, 1024)
# The largest value is about three years, the longest time that threads can wait.
SECONDS = Range(0, 1e8)
HOURS = Range(0, 1e5)
DOLLARS = Range(0, 1e10)

RANGES: dict[str, Range] = {
    'model.vocab_size': Range(0, INT32),
    'model.num_layers': Range(1, 1000),
    'model.dim': Range(1, 2**20),
    'model.num_heads': Range(1, 2**16),
    'model.num_kv_heads': Range(0, 2**16),
    'model.head_dim': Range(0, 2**16),
    'model.kv_lora_rank': Range(0, 2**16),
    'model.q_lora_rank': Range(0, 2**16),
    'model.qk_nope_head_dim': Range(0, 2**16),
    'model.qk_rope_head_dim': Range(0, 2**16),
    'model.v_head_dim': Range(0, 2**16),
    'model.ffn_dim': Range(0, 2**24),
    'model.num_experts': Range(0, 2**14),
    'model.num_experts_per_token': Range(0, 2**14),
    'model.expert_ffn_dim': Range(0, 2**24),
    'model.num_shared_experts': Range(0, 2**10),
    'model.num_dense_layers': Range(0, 1000),
    'model.routed_scaling_factor': Range(0, 1000, above=True),
    'model.num_expert_groups': COUNT_FROM_1,
    'model.num_groups_per_token': COUNT_FROM_1,
    'model.expert_capacity_factor': Range(0, 1000),
    'model.max_positions': Range(0, INT32),
    'model.partial_rotary_factor': FRACTION_ABOVE_0,
    'model.rope_theta': Range(1, 1e12),
    'model.rope_local_theta': Range(1, 1e12, or_zero=True),
    'model.rope_scaling_factor': Range(1, 1e5),
    'model.original_max_positions': Range(0, INT32),
    'model.rope_low_freq_factor': TURNS,
    'model.rope_high_freq_factor': TURNS,
    'model.rope_beta_slow': TURNS,
    'model.rope_beta_fast': TURNS,
    'model.rope_attention_factor': Range(0.01, 100, or_zero=True),
    'model.rope_mscale_all_dim': Range(0, 100),
    'model.norm_epsilon': EPSILON,
    'model.embedding_multiplier': Range(1e-4, 1e5, or_zero=True),
    'model.residual_multiplier': MULTIPLIER,
    'model.attention_multiplier': Range(1e-4, 1e5, or_zero=True),
    'model.attention_softcap': Range(0.1, 1e5, or_zero=True),
    'model.logits_scaling': MULTIPLIER,
    'model.logit_softcap': Range(0.1, 1e5, or_zero=True),
    'model.sliding_window': Range(0, INT32),
    'model.init_std': Range(1e-30, 1),
    'model.dropout': FRACTION_BELOW_1,
    'model.mtp_depth': Range(0, 16),
    'model.quantization_group_size': Range(0, 2**24),
    'model.lora_rank': Range(0, 2**16),
    'model.lora_alpha': Range(0, 1e5, above=True),
    'data.warn_epochs': Range(1, 1e5),
    'data.seq_len': Range(2, 2**24),
    'data.seed': SEED,
    'data.shuffle_shards': Range(0, 10**9),
    'data.num_threads': WORKERS_FROM_1,
    'data.prefetch_buffer_size': Range(1, 10**5),
    'data.num_workers': WORKERS,
    'data.cache_limit_gib': Range(0, 1e9),
    'data.download_threads': WORKERS_FROM_1,
    'train.num_steps': STEPS,
    'train.num_tokens': TOKENS,
    'train.num_epochs': Range(0, 1e6),
    'train.hours': HOURS,
    'train.dollars': DOLLARS,
    'train.price_per_hour': Range(0, 1e5),
    'train.global_batch_size': Range(0, 10**8),
    'train.global_batch_size_tokens': Range(0, 10**12),
    'train.per_device_batch_size': Range(AUTO, 10**8),
    'train.log_every': STEPS_FROM_1,
    'train.seed': SEED,
    'train.loss_chunk_tokens': Range(1, INT32),
    'train.z_loss': WEIGHT,
    'train.load_balancing_loss': WEIGHT,
    'train.upcycling_noise': WEIGHT,
    'train.router_z_loss': WEIGHT,
    'train.router_bias_rate': WEIGHT,
    'train.mtp_loss_weight': Range(0, WEIGHT.high, above=True),
    'train.initial_loss_scale': Range(1, 2**30),
    'train.loss_scale_growth_interval': STEPS_FROM_1,
    'train.hang_timeout_seconds': Range(0, SECONDS.high, above=True),
    'guard.max_consecutive_skips': STEPS_FROM_1,
    'eval.interval': STEPS,
    'eval.num_batches': STEPS,
    'eval.num_samples': Range(0, 1000),
    'eval.sample_max_tokens': Range(1, 10**5),
    'eval.tasks_interval': STEPS,
    'eval.tasks_limit': STEPS,
    'optimizer.learning_rate': Range(0, RATE.high, above=True),
    'optimizer.adam_learning_rate': RATE,
    'optimizer.embedding_learning_rate': RATE,
    'optimizer.wsd_decay_fraction': FRACTION_ABOVE_0,
    'optimizer.warmup_steps': STEPS,
    'optimizer.warmup_tokens': TOKENS,
    'optimizer.min_learning_rate': RATE,
    'optimizer.beta1': FRACTION_BELOW_1,
    'optimizer.beta2': FRACTION_BELOW_1,
    'optimizer.eps': EPSILON,
    'optimizer.muon_momentum': FRACTION_BELOW_1,
    'optimizer.muon_momentum_warmup_steps': STEPS,
    'optimizer.weight_decay': Range(0, 10),
    'optimizer.max_grad_norm': Range(0, 1e9),
    'optimizer.ema_decay': FRACTION_BELOW_1,
    **{f'mesh.{axis}': Range(-1, 2**20) for axis in MESH_AXES},
    'mesh.num_pipeline_repeats': Range(1, 1000),
    'checkpoint.save_interval_steps': STEPS,
    'checkpoint.save_interval_minutes': Range(0, 1e6),
    'checkpoint.max_to_keep': STEPS_FROM_1,
    'checkpoint.keep_best': STEPS,
    'checkpoint.keep_period': STEPS,
    'checkpoint.max_gib': Range(0, 1e9),
    # The values of the window are kept on the devices and sorted at every step.
    'guard.spike_window': Range(0, 2**16),
    'guard.spike_threshold': Range(0, 1e6, above=True),
    'guard.max_rollbacks': COUNT,
    'guard.rollback_skip_steps': STEPS,
    'guard.rollback_lr_factor': FRACTION_ABOVE_0,
    'guard.replay_fraction': FRACTION,
    'guard.early_stopping_patience': STEPS,
    'guard.early_stopping_min_delta': Range(0, 1e6),
    'guard.max_hours': HOURS,
    'guard.max_dollars': DOLLARS,
    'dpo.beta': Range(0, WEIGHT.high, above=True),
    'dpo.label_smoothing': FRACTION_BELOW_1,
    'dpo.rpo_alpha': WEIGHT,
    'dpo.desirable_weight': WEIGHT,
    'dpo.undesirable_weight': WEIGHT,
    'grpo.num_generations': Range(2, 10**5),
    'grpo.prompts_per_rollout': Range(0, 10**6),
    'grpo.max_completion_length': Range(0, 2**24),
    'grpo.max_tool_calls': COUNT_FROM_1,
    'grpo.num_iterations': COUNT_FROM_1,
    'grpo.importance_sampling_cap': Range(1, 1000),
    'grpo.epsilon': FRACTION,
    'grpo.epsilon_high': WEIGHT,
    'grpo.kl_coef': WEIGHT,
    'grpo.eval_num_prompts': STEPS,
    'grpo.eval_num_generations': COUNT,
    'distill.weight': FRACTION_ABOVE_0,
    'distill.temperature': Range(0.01, 1000),
    'distill.top_k': Range(0, INT32),
    'alerts.min_utilization': Range(0, 100),
    'alerts.min_mfu': FRACTION,
    'alerts.min_tokens_per_second': Range(0, 1e12),
    'metrics.device_stats_interval_seconds': SECONDS,
    'metrics.goodput_interval_seconds': SECONDS,
    'metrics.peak_tflops': Range(0, 1e6),
    'profile.start_step': STEPS,
    'profile.num_steps': COUNT_FROM_1,
}


def check_ranges(config: Config) -> None:
    """Checks every numeric key against its range.

    Raises:
        InputError: a value is outside its range, NaN or infinite.
    """
    for key, allowed in RANGES.items():
        section, name = key.split('.')
        value = getattr(getattr(config, section), name)
        if value not in allowed:
            finite = '' if abs(value) < math.inf else 'finite, '
            raise InputError(f'{key}={_shown(value)}: must be {finite}{allowed}')


def _shown(value: float) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) >= 10**5:
        return f'{value:g}'
    # Python raises ValueError when it formats integers of several thousand digits.
    if isinstance(value, int) and abs(value) >= 10**20:
        return f'{"-" if value < 0 else ""}10^{int(value.bit_length() * 0.30103)}'
    return str(value)
