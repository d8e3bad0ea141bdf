"""Former names of metrics and options, which remain valid until release 0.3. Config keys declare theirs.

A former name on a command line or in a config file prints one line with its new name. Files that maxlm wrote,
config.json and metrics.jsonl of earlier runs, are read without a message.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

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
