"""Config keys of evaluations, alerts, metrics and profiles.

They do not change the training result, except through `guard` and `checkpoint.keep_best`, which use evaluations.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from maxlm.config.sections.declaration import Form, Renamed
from maxlm.config.sections.ranges import Fraction, Range, Seconds, Steps
from maxlm.storage.paths import Kind, PathOption


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    # Steps between two evaluations on the validation split; 0 = never. Otherwise the last step is always evaluated.
    interval: Annotated[Steps, Renamed('every')] = 0
    # Number of batches per evaluation, each of the global batch size; 0 = the entire split.
    num_batches: Steps = 0
    # Number of prompts that the model continues at each evaluation, for samples.jsonl, the log and TensorBoard. They
    # are the beginnings of validation documents, selected by data.seed. 0 = none.
    num_samples: Annotated[int, Range(0, 1000), Renamed('samples')] = 0
    # Prompts used instead of validation documents: ('Once upon a time', 'def main(').
    sample_prompts: tuple = ()
    # Maximum number of tokens per continuation.
    sample_max_tokens: Annotated[int, Range(1, 10**5), Renamed('sample_tokens')] = 64
    # lm-eval benchmarks scored by likelihood, as names (need the extra `eval` and access to the hub) or as paths of
    # task files: ('arc_easy', 'tasks/mine.yaml'). `core:BUNDLE` is the CORE metric of a bundle, at a path or a URL.
    tasks: Annotated[tuple, PathOption()] = ()
    # Steps between two runs of the benchmarks, which also run at the last step; 0 = never.
    tasks_interval: Annotated[Steps, Renamed('tasks_every')] = 0
    # Maximum number of documents per benchmark; 0 = all.
    tasks_limit: Steps = 0


@dataclasses.dataclass(frozen=True)
class AlertsConfig:
    # Destinations of alerts in addition to the log (maxlm/telemetry/alerts.py). This one is a file that receives one
    # JSON line per alert; a relative path is relative to the workdir. '' = none, here and below.
    file: Annotated[str, PathOption(Kind.FILE, may_be_empty=True, keep_home=True)] = ''
    # Shell command, e.g. 'mail -s "$MAXLM_ALERT_MESSAGE" me@example.org'. It receives the alert as JSON on stdin. Read
    # secrets from the environment. The value is hidden in reports, trackers and uploads.
    command: Annotated[str, Form.SECRET] = ''
    # Name of the environment variable that contains a webhook URL (Slack, Mattermost, Google Chat, Teams). Never the
    # URL itself, which is a secret.
    webhook_env_var: Annotated[str, Renamed('webhook')] = ''
    # Thresholds of alerts; 0 = off. An alert is sent when the value is beyond the threshold on 5 log lines or samples
    # in a row, and again after a recovery (docs/monitoring.md). Mean utilization of the host's accelerators
    # in percent, from the samples of metrics.device_stats_interval_seconds:
    min_utilization: Annotated[float, Range(0, 100)] = 0.0
    # MFU on log lines, as a fraction.
    min_mfu: Fraction = 0.0
    # Tokens per second of the entire run on log lines.
    min_tokens_per_second: Annotated[float, Range(0, 1e12)] = 0.0
    # Memory in use on the host in percent, e.g. 90. The system kills processes of a host without free memory. The
    # memory of accelerators needs no alert: it is checked before the first step.
    max_host_memory: Annotated[float, Range(0, 100)] = 0.0


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    # Log loss and fraction of each source if there are several sources.
    per_source_loss: Annotated[bool, Renamed('by_source')] = True
    # Write TensorBoard event files next to metrics.jsonl.
    tensorboard: bool = True
    # Log the same curves to Weights & Biases; '' = no. offline: kept in WORKDIR/wandb, for `wandb sync` later. Needs
    # the extra `wandb` and, for online, the API key of an account (`wandb login`).
    wandb: Literal['', 'online', 'offline'] = ''
    # Weights & Biases project of the run.
    wandb_project: str = 'maxlm'
    # Seconds between two samples of host and accelerator statistics in WORKDIR/devices.jsonl; 0 = none.
    device_stats_interval_seconds: Annotated[Seconds, Renamed('devices_seconds')] = 30.0
    # Seconds between two lines of WORKDIR/goodput.jsonl. A killed run loses at most this much of its time record. 0 =
    # only at saves, rollbacks and the end.
    goodput_interval_seconds: Annotated[Seconds, Renamed('ledger_seconds')] = 10.0
    # Show a progress bar when standard error is a terminal.
    progress_bar: Annotated[bool, Renamed('progress')] = True
    # Peak TFLOP/s of one device, for MFU; 0 = from the chip's datasheet, or on a CPU measured with a large matrix
    # product.
    peak_tflops: Annotated[float, Range(0, 1e6)] = 0.0


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    # First step, counted from 1, whose operations are traced into WORKDIR/profile, for TensorBoard and Perfetto. The
    # slowest operations are logged. 0 = none.
    start_step: Annotated[Steps, Renamed('start')] = 0
    # Number of traced steps.
    num_steps: Annotated[int, Range(1, 10**5)] = 3
