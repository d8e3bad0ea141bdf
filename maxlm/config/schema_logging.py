"""Keys of what a run tells of itself: evaluations, alerts, metrics, a profile.

They change no result, but for what `guard` and `checkpoint.keep_best` make of evaluations.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    # Steps between two evaluations on the validation split; 0 = never. The last step is always evaluated otherwise.
    interval: int = 0
    # Batches of the global batch's size per evaluation; 0 = the whole split.
    num_batches: int = 0
    # Beginnings of validation documents (chosen by data.seed) that the model continues at each evaluation, for
    # samples.jsonl, the log and TensorBoard; 0 = none.
    num_samples: int = 0
    # Texts to continue instead: ('Once upon a time', 'def main(').
    sample_prompts: tuple = ()
    # Tokens of a continuation, at most.
    sample_max_tokens: int = 64
    # Benchmarks of lm-eval by likelihoods, as names (needs the extra `eval`, and the hub) or as paths of task files:
    # ('arc_easy', 'tasks/mine.yaml').
    tasks: tuple = ()
    # Steps between two times that they are run, and at the last step; 0 = never.
    tasks_interval: int = 0
    # Documents of each, at most; 0 = all.
    tasks_limit: int = 0


@dataclasses.dataclass(frozen=True)
class AlertsConfig:
    # Destinations of alerts besides the log (maxlm/telemetry/alerts.py). This one is a file that gets one JSON line
    # for each alert; a relative path is below the workdir. '' = none, here and below.
    file: str = ''
    # A line of shell, e.g. 'mail -s "$MAXLM_ALERT_MESSAGE" me@example.org'. The alert comes as JSON on its input.
    command: str = ''
    # Name of the environment variable that holds a webhook's URL (Slack, Mattermost, Google Chat, Teams); never the URL
    # itself, which is a secret.
    webhook_env_var: str = ''


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    # Tell loss and share of each source, where there are several.
    per_source_loss: bool = True
    # Write TensorBoard event files next to metrics.jsonl.
    tensorboard: bool = True
    # The same curves at Weights & Biases: '' = no | online | offline (kept in WORKDIR/wandb, for `wandb sync` later).
    # Needs the extra `wandb`, and online the key of an account (`wandb login`).
    wandb: str = ''
    # Project that the run is in there.
    wandb_project: str = 'maxlm'
    # Seconds between two readings of the machine and its accelerators into WORKDIR/devices.jsonl; 0 = none.
    device_stats_interval_seconds: float = 30.0
    # Seconds between two lines of WORKDIR/goodput.jsonl: what a run that is killed does not tell of its time. 0 = only
    # at saves, rollbacks and the end.
    goodput_interval_seconds: float = 10.0
    # Show a progress bar when standard error is a terminal.
    progress_bar: bool = True
    # Peak TFLOP/s of one device, for MFU; 0 = the chip's datasheet, or on a CPU what a large product reaches here.
    peak_tflops: float = 0.0


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    # Number, from 1, of the first step whose operations are traced into WORKDIR/profile, for TensorBoard and Perfetto;
    # those that take most time are logged. 0 = none.
    start_step: int = 0
    # Steps that are traced.
    num_steps: int = 3
