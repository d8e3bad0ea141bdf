"""Former names of config keys, metrics and options, which remain valid until release 0.3.

A former name on a command line or in a config file prints one line with its new name. Files that maxlm wrote,
config.json and metrics.jsonl of earlier runs, are read without a message.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

KEYS = {
    'train.global_batch': 'train.global_batch_size',
    'train.global_batch_tokens': 'train.global_batch_size_tokens',
    'train.micro_batch': 'train.per_device_batch_size',
    'train.loss_chunk': 'train.loss_chunk_tokens',
    'train.loss_chunk_size': 'train.loss_chunk_tokens',
    'train.loss_scale': 'train.initial_loss_scale',
    'train.loss_scale_steps': 'train.loss_scale_growth_interval',
    'train.compile_cache': 'train.compilation_cache_dir',
    'train.stuck_seconds': 'train.hang_timeout_seconds',
    'train.max_skipped_steps': 'guard.max_consecutive_skips',
    'data.window': 'data.seq_len',
    'data.context_schedule': 'data.seq_len_schedule',
    'data.isolate_documents': 'data.document_mask',
    'data.pool_shards': 'data.shuffle_shards',
    'data.allow_change': 'data.allow_dataset_change',
    'data.threads': 'data.num_threads',
    'data.workers': 'data.num_workers',
    'data.prefetch': 'data.prefetch_buffer_size',
    'data.cache': 'data.cache_dir',
    'data.cache_gib': 'data.cache_limit_gib',
    'data.fetch_threads': 'data.download_threads',
    'model.rotary_fraction': 'model.partial_rotary_factor',
    'model.rotary_theta': 'model.rope_theta',
    'model.rotary_scaling': 'model.rope_scaling',
    'model.rotary_factor': 'model.rope_scaling_factor',
    'model.rotary_original_positions': 'model.original_max_positions',
    'model.rotary_low_turns': 'model.rope_low_freq_factor',
    'model.rotary_high_turns': 'model.rope_high_freq_factor',
    'model.rotary_beta_slow': 'model.rope_beta_slow',
    'model.rotary_beta_fast': 'model.rope_beta_fast',
    'model.rotary_truncate': 'model.rope_truncate',
    'model.rotary_attention_factor': 'model.rope_attention_factor',
    'model.position': 'model.position_embedding',
    'model.norm_scale': 'model.norm_use_scale',
    'model.remat': 'model.remat_policy',
    'model.matmul': 'model.matmul_precision',
    'model.weights': 'model.weight_quantization',
    'model.weights_group': 'model.quantization_group_size',
    'model.lora_targets': 'model.lora_target_modules',
    'mesh.zero': 'mesh.zero_stage',
    'mesh.stage_repeats': 'mesh.num_pipeline_repeats',
    'mesh.offload': 'mesh.host_offload',
    'optimizer.moments': 'optimizer.moment_dtype',
    'optimizer.clip_norm': 'optimizer.max_grad_norm',
    'optimizer.epsilon': 'optimizer.eps',
    'optimizer.momentum': 'optimizer.muon_momentum',
    'optimizer.momentum_warmup_steps': 'optimizer.muon_momentum_warmup_steps',
    'optimizer.decay_fraction': 'optimizer.wsd_decay_fraction',
    'optimizer.frozen': 'optimizer.frozen_params',
    'optimizer.trained': 'optimizer.trainable_params',
    'checkpoint.every_steps': 'checkpoint.save_interval_steps',
    'checkpoint.every_minutes': 'checkpoint.save_interval_minutes',
    'checkpoint.keep_last': 'checkpoint.max_to_keep',
    'checkpoint.permanent_every': 'checkpoint.keep_period',
    'checkpoint.mirror': 'checkpoint.remote_dir',
    'guard.window': 'guard.spike_window',
    'guard.spike_deviations': 'guard.spike_threshold',
    'guard.rollback_margin': 'guard.rollback_skip_steps',
    'guard.rollback_rate_factor': 'guard.rollback_lr_factor',
    'guard.patience': 'guard.early_stopping_patience',
    'guard.min_delta': 'guard.early_stopping_min_delta',
    'eval.every': 'eval.interval',
    'eval.tasks_every': 'eval.tasks_interval',
    'eval.samples': 'eval.num_samples',
    'eval.sample_tokens': 'eval.sample_max_tokens',
    'metrics.by_source': 'metrics.per_source_loss',
    'metrics.progress': 'metrics.progress_bar',
    'metrics.devices_seconds': 'metrics.device_stats_interval_seconds',
    'metrics.ledger_seconds': 'metrics.goodput_interval_seconds',
    'profile.start': 'profile.start_step',
    'alerts.webhook': 'alerts.webhook_env_var',
    'dpo.loss': 'dpo.loss_type',
    'dpo.next_token_weight': 'dpo.rpo_alpha',
    'grpo.samples': 'grpo.num_generations',
    'grpo.epochs': 'grpo.num_iterations',
    'grpo.max_tokens': 'grpo.max_completion_length',
    'grpo.clip_low': 'grpo.epsilon',
    'grpo.clip_high': 'grpo.epsilon_high',
    'grpo.kl_weight': 'grpo.kl_coef',
    'grpo.divide_by_deviation': 'grpo.scale_rewards',
    'grpo.loss_mean': 'grpo.loss_type',
    'grpo.gather_once': 'grpo.gather_params_for_generation',
    'grpo.eval_samples': 'grpo.eval_num_generations',
}
# New key → former value → new value, for keys that were renamed together with their values.
VALUES: dict[str, dict[Any, Any]] = {'grpo.loss_type': {'sequence': 'grpo', 'token': 'dapo', 'budget': 'dr_grpo'}}
# Lower limits of values of renamed keys. train.loss_chunk counted the positions of each row.
LEAST_VALUES = {'train.loss_chunk_tokens': 4096}
# Values of keys that the config.json files of earlier versions do not have, where the default has changed the meaning
# of a run since.
VALUES_BEFORE: dict[str, Any] = {'data.train_first_token': False}
METRICS = {
    'perf/step_seconds': 'perf/step_time_seconds',
    'perf/data_wait_seconds': 'perf/data_loading_seconds',
    'perf/device_memory_gib': 'memory/peak_gib',
    'perf/save_seconds': 'perf/checkpoint_blocked_seconds',
    'train/skipped': 'train/skipped_steps',
    'train/accuracy': 'train/rewards/accuracies',
    'train/margin': 'train/rewards/margins',
    'train/chosen_reward': 'train/rewards/chosen',
    'train/rejected_reward': 'train/rewards/rejected',
    'train/chosen_log_prob': 'train/logps/chosen',
    'train/rejected_log_prob': 'train/logps/rejected',
    'eval/margin': 'eval/rewards/margins',
    'eval/chosen_reward': 'eval/rewards/chosen',
    'eval/rejected_reward': 'eval/rewards/rejected',
    'eval/chosen_log_prob': 'eval/logps/chosen',
    'eval/rejected_log_prob': 'eval/logps/rejected',
    'train/clip_share': 'train/clip_fraction',
    'train/old_kl': 'train/approx_kl',
    'train/reference_kl': 'train/kl',
    'rollout/reward_deviation': 'rollout/reward_std',
    'rollout/agreeing': 'rollout/frac_reward_zero_std',
    'rollout/cut_off': 'rollout/clipped_ratio',
    'rollout/length': 'rollout/mean_length',
    'rollout/judging_seconds': 'rollout/reward_seconds',
    'eval/mean_accuracy': 'eval/pass_at_1',
    'cost/dollars_at_end': 'cost/projected_dollars',
    'cost/seconds_left': 'perf/eta_seconds',
    'goodput/share': 'goodput/fraction',
    'device/use_percent': 'device/utilization_percent',
    'data/window': 'data/seq_len',
}
# Prefixes of names that end with the name of a source.
METRIC_PREFIXES = {'data/share/': 'data/fraction/'}
# Command → former option → new option.
OPTIONS = {
    'prepare': {
        '--infill': '--fim-rate',
        '--infill-spm': '--fim-spm-rate',
        '--pack-window': '--pack-seq-len',
        '--validation-share': '--validation-fraction',
        '--near-threshold': '--dedup-threshold',
        '--end-of-document': '--eod-token',
        '--skip-bad': '--skip-bad-records',
        '--engine': '--executor',
    },
    'serve': {
        '--name': '--served-model-name',
        '--context': '--max-model-len',
        '--cache': '--kv-cache-dtype',
        '--devices': '--tensor-parallel-size',
        '--max-waiting': '--max-queue-size',
        '--max-body': '--max-request-bytes',
        '--max-seconds': '--request-timeout',
    },
    'generate': {'--cache': '--kv-cache-dtype'},
    'quantize': {'--weights': '--format', '--no-evaluate': '--no-eval'},
    'plan': {'--fit': '--search', '--refit': '--fit-scaling-law'},
    'monitor': {'--every': '--interval'},
    'checkpoints prune': {'--keep-last': '--max-to-keep', '--permanent-every': '--keep-period'},
    'checkpoints list': {'--keep-last': '--max-to-keep', '--permanent-every': '--keep-period'},
}

_reported: set[str] = set()


def current_key(key: str, value: Any = None) -> tuple[str, Any]:
    """Returns the current name and value of a config key `section.key` that may be a former one."""
    if key not in KEYS:
        return key, value
    new = KEYS[key]
    if isinstance(value, str):
        value = VALUES.get(new, {}).get(value, value)
    elif isinstance(value, int) and new in LEAST_VALUES:
        value = max(value, LEAST_VALUES[new])
    return new, value


def current_config(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a config.json with current key names; other values are kept unchanged.

    Keys that did not exist when the file was written have the values that the run was made with.
    """
    current: dict[str, Any] = {
        name: {} if isinstance(section, Mapping) else section for name, section in sections.items()
    }
    for name, section in sections.items():
        for key, value in section.items() if isinstance(section, Mapping) else ():
            new, new_value = current_key(f'{name}.{key}', value)
            place, _, new_key = new.partition('.')
            if isinstance(current.setdefault(place, {}), dict):
                current[place][new_key] = new_value
    for key, value in VALUES_BEFORE.items():
        place, _, name = key.partition('.')
        if isinstance(current.get(place), dict):
            current[place].setdefault(name, value)
    return current


def report_renamed(old: str, new: str) -> None:
    """Prints a warning about a former name, once per name."""
    if old not in _reported:
        _reported.add(old)
        print(f'warning: {old} is now {new}; the former name works until release 0.3', file=sys.stderr)


def current_metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Returns a line of metrics.jsonl with the current names of its metrics."""
    return {_current_metric(name): value for name, value in line.items()}


@functools.cache
def _current_metric(name: str) -> str:
    for old, new in METRIC_PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return METRICS.get(name, name)
