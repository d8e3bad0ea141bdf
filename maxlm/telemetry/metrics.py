"""Metrics of a run: one table of names, units and meanings, and the writer of metrics.jsonl and the files beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from maxlm.config.renames import current_metrics
from maxlm.log import logger
from maxlm.storage.jsonl import JsonlWriter, read_lines, truncation_note
from maxlm.workdir.files import EXPERT_LOADS_FILE, METRICS_FILE, SAMPLES_FILE

# The steps of two lines of expert_loads.jsonl differ by at least this factor, so the file stays small.
LOADS_FACTOR = 1.05
# Separates the prompt from the generated text in samples.
CURSOR = '▮'


class Metric(NamedTuple):
    """Unit and meaning of a metric."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    'train/loss': Metric(
        'nats/token', 'loss of train.objective; for next_token, the mean cross-entropy of the tokens in the step'
    ),
    'train/loss_max': Metric(
        'nats/token', 'largest loss of the steps since the previous line; null if the loss of one is not finite'
    ),
    'train/best_loss': Metric('nats/token', 'lowest train/loss written so far'),
    'train/perplexity': Metric('', 'exp(train/loss)'),
    'train/z_loss': Metric(
        'nats/token', 'z-loss term (train.z_loss): part of the optimized objective, not of train/loss'
    ),
    # Experts: means over the layers and the tokens of the step.
    'train/load_balancing_loss': Metric(
        '', 'experts: load-balancing loss, without the factor train.load_balancing_loss; 1 is balanced'
    ),
    'train/router_z_loss': Metric('', 'experts: z-loss of the routers, without the factor train.router_z_loss'),
    'train/router_entropy': Metric('nats', 'experts: entropy of the router'),
    'train/dropped_tokens': Metric(
        '', 'experts: fraction of the selections that exceeded the capacity of an expert (model.expert_capacity_factor)'
    ),
    'train/max_expert_load': Metric('', 'experts: load of the most loaded expert divided by the mean load'),
    'train/mtp_loss': Metric(
        'nats/token',
        'multi-token prediction: sum of the cross-entropies of the token after next, divided by the number of tokens '
        'of train/loss',
    ),
    'train/mtp_loss/*': Metric('nats/token', 'train/mtp_loss of one module, if model.mtp_depth is above 1'),
    'train/distill_kl': Metric(
        'nats/token',
        'distillation: KL divergence of the model from its teacher at distill.temperature, times its square',
    ),
    # DPO and reward models: means over the pairs of the step. KTO: means over the desirable (chosen) or undesirable
    # (rejected) answers.
    'train/rewards/accuracies': Metric(
        '',
        'DPO and reward models: fraction of pairs whose chosen response has the higher reward; KTO: fraction of '
        'responses whose log-probability ratio is above (desirable) or below (undesirable) the reference point',
    ),
    'train/rewards/margins': Metric(
        '', 'DPO and reward models: reward of the chosen response minus that of the rejected response'
    ),
    'train/rewards/chosen': Metric(
        '',
        'reward of the chosen response; DPO: dpo.beta · its log-probability relative to the reference model; reward '
        'model: its score',
    ),
    'train/rewards/rejected': Metric('', 'DPO and reward models: reward of the rejected response'),
    'train/rewards/mean': Metric('', 'reward models: mean score of both responses'),
    'train/logps/chosen': Metric('nats', 'DPO: log-probability of the chosen response'),
    'train/logps/rejected': Metric('nats', 'DPO: log-probability of the rejected response'),
    'train/reference_point': Metric(
        'nats', 'KTO: KL divergence from the reference model, estimated from mismatched responses; at least 0'
    ),
    # GRPO: means over the tokens of the step's responses.
    'train/clip_fraction': Metric('', 'GRPO: fraction of tokens clipped by the probability ratio'),
    'train/entropy': Metric('nats', 'GRPO: entropy of the next-token distribution'),
    'train/approx_kl': Metric('nats', 'GRPO: KL divergence from the model that generated the responses'),
    'train/kl': Metric('nats', 'GRPO: KL divergence from the initial model, by grpo.kl_estimator'),
    'train/value_loss': Metric('', 'PPO: half of the squared error of the values, at least that of the clipped values'),
    'train/value_clip_fraction': Metric('', 'PPO: fraction of tokens whose clipped value has the larger error'),
    'train/logprob_difference': Metric('nats', 'GRPO: largest difference of a log-probability from that of sampling'),
    'train/importance_weight': Metric('', 'GRPO with grpo.max_staleness above 0: truncated importance weight'),
    'train/importance_truncated_fraction': Metric('', 'GRPO with grpo.max_staleness: fraction of truncated weights'),
    'train/loss_scale': Metric('', 'float16 loss scale used in the step'),
    'train/learning_rate': Metric(
        '', 'learning rate of the step; learning rates with other peaks are proportional to it'
    ),
    'train/grad_norm': Metric('', 'global norm of the gradient before clipping'),
    'train/grad_norm_max': Metric(
        '', 'largest train/grad_norm of the steps since the previous line; null if that of one is not finite'
    ),
    'train/update_norm': Metric(
        '',
        'global norm of the change of the parameters, with learning rate and weight decay; 0 if the step is skipped; '
        'not with mesh.host_offload',
    ),
    'train/second_moment_ratio': Metric(
        '',
        "RMS_t of Wortsman et al. 2023: √mean(g²/v) with the clipped gradient g and AdamW's second moment v, largest "
        'value of all arrays; far below 1, v is stale; far above 1, gradients have grown suddenly; not with '
        'mesh.host_offload',
    ),
    'train/param_norm': Metric(
        '', 'global norm of the parameters after the step; with quantized kernels, of the trained ones'
    ),
    'train/tokens': Metric('tokens', 'token positions in all batches so far'),
    'train/epoch': Metric('epochs', 'passes over the training split so far'),
    'train/newly_skipped_steps': Metric('steps', 'steps skipped since the previous line'),
    'train/skipped_steps': Metric(
        'steps', 'steps skipped so far because the loss or gradient norm spiked or was not finite'
    ),
    # `*` is the name of a source.
    'train/loss/*': Metric('nats/token', 'train/loss over the tokens of one source'),
    'train/tokens/*': Metric('tokens', 'target tokens of one source in the step'),
    'eval/loss': Metric(
        'nats/token',
        'train/loss on the validation split; GRPO: fraction of wrong answers (1 - eval/accuracy) '
        'or, with reward_model or an environment, -eval/reward',
    ),
    'eval/perplexity': Metric('', 'exp(eval/loss)'),
    'eval/accuracy': Metric('', 'GRPO: fraction of prompts whose greedy response is correct'),
    'eval/reward': Metric('', 'GRPO with reward_model or an environment: mean reward of the greedy responses'),
    'eval/rewards/accuracies': Metric('', 'train/rewards/accuracies on the validation split'),
    'eval/rewards/margins': Metric('', 'train/rewards/margins on the validation split'),
    'eval/rewards/chosen': Metric('', 'train/rewards/chosen on the validation split'),
    'eval/rewards/rejected': Metric('', 'train/rewards/rejected on the validation split'),
    'eval/rewards/mean': Metric('', 'train/rewards/mean on the validation split'),
    'eval/logps/chosen': Metric('nats', 'DPO: train/logps/chosen on the validation split'),
    'eval/logps/rejected': Metric('nats', 'DPO: train/logps/rejected on the validation split'),
    'eval/reference_point': Metric('nats', 'KTO: train/reference_point on the validation split'),
    'eval/pass_at_1': Metric('', 'GRPO: fraction of correct responses among those sampled at temperature 1 (pass@1)'),
    'eval/pass_at_k': Metric(
        '', 'GRPO: fraction of prompts with a correct response among grpo.eval_num_generations samples'
    ),
    'eval/length': Metric('tokens', 'GRPO: mean length of the greedy responses'),
    'eval/loss/*': Metric('nats/token', 'eval/loss over the tokens of one source'),
    'eval/tasks/*': Metric('', 'metric of a benchmark in eval.tasks, named as by maxlm evaluate, e.g. arc_easy/acc'),
    'eval/tokens/*': Metric('tokens', 'target tokens of one source in the evaluation'),
    'data/fraction/*': Metric('', 'fraction of all windows so far that are from one source'),
    'data/epoch/*': Metric('epochs', 'passes over one source so far'),
    'data/document_length': Metric(
        'tokens', 'mean length of the documents in the step, or of their parts in a window (data.document_mask)'
    ),
    'data/seq_len': Metric('tokens', 'sequence length of the step'),
    'data/fim_fraction': Metric(
        '',
        "fraction of the documents in the first process's batch that are reordered for fill-in-the-middle; only for "
        'data prepared with --fim-rate',
    ),
    'perf/tokens_per_second': Metric('tokens/s', 'token positions trained on per second since the previous line'),
    'perf/step_time_seconds': Metric(
        's', 'mean time per step since the previous line, measured when results arrive from the device'
    ),
    'perf/data_loading_seconds': Metric('s', 'mean time per step spent waiting for the batch since the previous line'),
    'perf/eta_seconds': Metric(
        's', 'estimated time to the last step, with evaluations and saves, at the mean speed of this attempt'
    ),
    'perf/eval_seconds': Metric('s', 'time spent in evaluations since the previous line'),
    'perf/checkpoint_blocked_seconds': Metric('s', 'time for which saves blocked training since the previous line'),
    'perf/compile_seconds': Metric('s', 'time spent compiling programs for later steps since the previous line'),
    'perf/rollout_seconds': Metric('s', 'GRPO: time spent generating and scoring responses since the previous line'),
    'perf/callback_seconds': Metric('s', 'time spent in callbacks that read the state since the previous line'),
    'perf/profile_seconds': Metric('s', 'time spent starting and stopping the profiler since the previous line'),
    'perf/replay_seconds': Metric('s', 'time spent computing steps again since the previous line'),
    'perf/mfu': Metric('', 'model FLOPs utilization, counting causal attention'),
    'perf/mfu_full': Metric('', 'model FLOPs utilization, counting full attention'),
    'memory/peak_gib': Metric('GiB', 'peak memory in use on the first device so far, if the device reports it'),
    'cost/hours': Metric('h', 'duration of all attempts of the run so far, without the time between them'),
    'cost/dollars': Metric('$', 'cost of all devices for cost/hours, if their price is known'),
    'cost/projected_dollars': Metric('$', 'projected cost at the last step, at the speed of this attempt'),
    'goodput/fraction': Metric('', 'fraction of wall-clock time since the first start spent on steps that were kept'),
    'replay/steps': Metric('steps', 'steps of this attempt that were computed twice so far'),
    'replay/differences': Metric('', 'differences between the two results, or in memory between two steps, so far'),
    'replay/loss_difference': Metric(
        'nats/token', 'absolute difference of the loss between the two results that differed last; 0 if none did'
    ),
    # Responses that the model generated before the step.
    'rollout/reward': Metric('', 'mean reward, before dynamic sampling'),
    'rollout/reward_std': Metric('', 'standard deviation of the rewards in a group, averaged over groups'),
    'rollout/reward/*': Metric('', 'mean of one component of a sum of rewards'),
    'rollout/reward_errors': Metric(
        '', 'fraction of responses for which a reward in the sandbox of grpo.sandbox_functions failed'
    ),
    'rollout/frac_reward_zero_std': Metric('', 'fraction of groups with equal rewards, before dynamic sampling'),
    'rollout/mean_length': Metric('tokens', 'mean length of the responses'),
    'rollout/clipped_ratio': Metric('', 'fraction of responses truncated at grpo.max_completion_length'),
    'rollout/entropy': Metric('nats', 'mean negative log-probability of the sampled tokens'),
    'rollout/kl': Metric('nats/token', 'with grpo.kl_in_reward: KL divergence from the initial model'),
    'rollout/explained_variance': Metric('', 'PPO: 1 - variance of the errors of the values / variance of the returns'),
    'rollout/num_gen_batches': Metric('', 'dynamic sampling: number of times that responses were generated'),
    'rollout/unfilled_groups': Metric('', 'dynamic sampling: fraction of groups that still have equal rewards'),
    'rollout/tokens_per_second': Metric('tokens/s', 'tokens generated per second of generation'),
    'rollout/generate_seconds': Metric('s', 'time spent generating the responses, without that of tools'),
    'rollout/train_seconds': Metric('s', 'time of the steps since the previous rollout of this attempt'),
    'rollout/reward_seconds': Metric('s', 'time spent scoring the responses'),
    'rollout/reward_wait_seconds': Metric('s', 'time for which the devices waited for rewards before the step'),
    'rollout/tool_wait_seconds': Metric('s', 'time for which the devices waited for tools or an environment'),
    'rollout/hidden_tool_seconds': Metric('s', 'time of environments that the devices did not wait for'),
    'rollout/hidden_reward_seconds': Metric('s', 'part of rollout/reward_seconds that the devices did not wait for'),
    'rollout/staleness': Metric('steps', 'optimizer steps between the sampling of the responses and their first step'),
    'rollout/tool_calls': Metric('', 'mean number of tool calls of a response'),
    'rollout/tool_errors': Metric('', 'fraction of tool calls that failed'),
    'rollout/turns': Metric('', 'mean number of turns of the model in a conversation with an environment'),
    'rollout/environment_failures': Metric('', 'number of conversations whose environment failed'),
    'rollout/epoch': Metric('epochs', 'passes over the prompts so far'),
    # Means of the readings on the first host since the previous line.
    'device/utilization_percent': Metric('%', 'utilization, mean over devices'),
    'device/memory_gib': Metric(
        'GiB', 'memory allocated from the driver, mean over devices; JAX allocates its share at startup'
    ),
    'device/temperature_c': Metric('°C', 'temperature of the hottest device'),
    'device/power_w': Metric('W', 'power draw of all devices'),
    'device/throttled': Metric('devices', 'devices whose clock is reduced for heat or power'),
    'device/ecc_errors': Metric('errors', 'uncorrected memory errors of all devices since the driver was loaded'),
    'host/cpu_percent': Metric('%', 'utilization of all CPU cores'),
    'host/ram_gib': Metric('GiB', 'memory in use'),
    'host/ram_percent': Metric('%', 'memory in use, of all memory'),
    'host/disk_free_gib': Metric('GiB', 'free space on the disk of the workdir'),
    'host/net_sent_mb': Metric('MB/s', 'network traffic sent to other hosts'),
    'host/net_received_mb': Metric('MB/s', 'network traffic received from other hosts'),
}


class MetricsCallback(Protocol):
    """Function of the user that is called with each line of metrics.jsonl. Its exceptions end the run."""

    def __call__(self, step: int, metrics: dict[str, float], /) -> bool | None:
        """Returns True to stop the run, which then saves a checkpoint.

        Args:
            step: number of completed steps.
            metrics: values of the line; docs/metrics.md lists their names.
        """


class Tracker(Protocol):
    """Additional destination of metrics. An exception disables the tracker and does not stop the run."""

    def begin(self, after_step: int, newest_step: int) -> None:
        """Starts a segment after `after_step`. The steps from there to `newest_step` were written and are repeated."""

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Writes the values of `MetricWriter.write`."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts by name."""

    def close(self) -> None:
        """Writes buffered data and closes the tracker."""


class MetricWriter:
    """Writes metrics.jsonl, samples.jsonl, expert_loads.jsonl and the trackers, for one segment of a run."""

    def __init__(
        self,
        workdir: Path,
        *,
        after_step: int,
        trackers: list[Tracker] | None = None,
        on_write: Callable[[int, Mapping[str, float]], None] = lambda step, values: None,
    ):
        """Opens the files and drops lines after `after_step`, whose steps are repeated.

        Args:
            workdir: workdir of the run.
            after_step: last step before the segment.
            trackers: trackers, which stay open for the next segment. A failing tracker is removed from the list.
            on_write: called with each line after it is written.
        """
        names = (METRICS_FILE, SAMPLES_FILE, EXPERT_LOADS_FILE)
        self._metrics, self._samples, self._expert_loads = (JsonlWriter(workdir / name) for name in names)
        newest_step = _drop_lines_after(workdir / METRICS_FILE, after_step, self._metrics)
        _drop_lines_after(workdir / SAMPLES_FILE, after_step, self._samples)
        _drop_lines_after(workdir / EXPERT_LOADS_FILE, after_step, self._expert_loads)
        self._next_loads = 0.0
        self._trackers = [] if trackers is None else trackers
        self._on_write = on_write
        self._notify(lambda tracker: tracker.begin(after_step, newest_step))

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Writes one line with `step`, `time` (seconds since 1970) and the values. Non-finite values become null.

        All names must be in METRICS.
        """
        unknown = {name for name in values if name not in METRICS and _pattern(name) not in METRICS}
        assert not unknown, f'metrics without a row in METRICS: {unknown}'
        time = round(time, 3)
        self._metrics.write({'step': step, 'time': time, **values})
        self._notify(lambda tracker: tracker.write(step, time, values))
        self._on_write(step, values)

    def write_samples(self, step: int, time: float, samples: Sequence[tuple[str, str]]) -> None:
        """Writes prompts with the model's completions, one line of samples.jsonl each."""
        for prompt, text in samples:
            self._samples.write({'time': round(time, 3), 'step': step, 'prompt': prompt, 'text': text})
        texts = {f'samples/{number}': f'{prompt}{CURSOR}{text}' for number, (prompt, text) in enumerate(samples)}
        self._notify(lambda tracker: tracker.write_texts(step, texts))

    def write_expert_loads(self, step: int, time: float, loads: Sequence[Sequence[float]], *, is_last: bool) -> None:
        """Writes a line of expert_loads.jsonl: the load of each expert by layer, relative to the mean load.

        A step close to that of the previous line is skipped, except for the last step of the run.
        """
        if step < self._next_loads and not is_last:
            return
        self._next_loads = LOADS_FACTOR * step
        rounded = [[round(load, 3) for load in layer] for layer in loads]
        self._expert_loads.write({'time': round(time, 3), 'step': step, 'loads': rounded})

    def _notify(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                logger.warning(f'{type(tracker).__name__} failed and is disabled ({type(error).__name__}: {error})')


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Reads the lines of metrics.jsonl. Skips a truncated last line of a killed writer.

    Raises:
        InputError: a line other than the last is not JSON.
    """
    return [current_metrics(line) for line in read_lines(workdir / METRICS_FILE).lines]


_READINGS = 'means of the readings since the previous line, one every `metrics.device_stats_interval_seconds`'
SECTIONS = {
    'train': 'The training step. Written every `train.log_every` steps',
    'eval': 'An evaluation. Written every `eval.interval` steps, `eval/tasks` every `eval.tasks_interval` steps',
    'data': 'The training data. Written with the metrics of the training step',
    'rollout': 'A rollout of `maxlm grpo`. Written before the first step that trains on its responses',
    'perf': 'Throughput and durations. Written with the metrics of the training step',
    'memory': 'Device memory. Written with the metrics of the training step',
    'cost': 'Time and money. Written with the metrics of the training step',
    'goodput': 'Use of the wall-clock time. Written with the metrics of the training step',
    'replay': (
        'Steps that are computed twice, see [wrong computations](reliability.md#wrong-computations). Written with the '
        'metrics of the training step'
    ),
    'device': f'The accelerators of the first host: {_READINGS}. Written with the metrics of the training step',
    'host': f'The first host: {_READINGS}. Written with the metrics of the training step',
}


def metrics_page() -> str:
    """Returns docs/metrics.md: METRICS as Markdown."""
    page = [
        '# Metrics',
        '',
        'Generated by `python -m tools.docs` from the table in `maxlm/telemetry/metrics.py`.',
        '',
        'A line of `metrics.jsonl` has `step`, `time` (seconds since 1970) and some of these metrics. TensorBoard and',
        'W&B use the same names. Values that are not finite are null. `*` is the name of a data source, a benchmark',
        'metric or a reward component. Losses by source are written if there are several sources; their mean, weighted',
        'by tokens, is the total loss.',
    ]
    for section, names in itertools.groupby(METRICS, lambda name: name.partition('/')[0]):
        page += ['', f'## {section}', '', f'{SECTIONS[section]}.', '', '| name | unit | meaning |', '|---|---|---|']
        page += [f'| `{name}` | {METRICS[name].unit} | {METRICS[name].meaning} |' for name in names]
    return '\n'.join(page) + '\n'


def perplexity(loss: float) -> float:
    """Returns exp(loss). A very large loss is clipped, so that the result does not overflow."""
    return math.exp(min(loss, 700.0))


def lowest_loss(workdir: Path, *, up_to: int) -> float:
    """Returns the lowest training loss in metrics.jsonl up to a step, or infinity if there is none."""
    losses = (line.get('train/loss') for line in read_metrics(workdir) if line['step'] <= up_to)
    return min((loss for loss in losses if loss is not None), default=math.inf)


def _pattern(name: str) -> str:
    """Returns the table row of a metric by source or task: train/loss/web → train/loss/*."""
    return '/'.join([*name.split('/')[:2], '*'])


def _drop_lines_after(path: Path, step: int, writer: JsonlWriter) -> int:
    """Drops the lines after `step`. Returns the newest step in the file before, or 0."""
    lines, truncated = read_lines(path)
    if truncated:
        logger.info(truncation_note(path.name))
    # Drop an evaluation at step 0 too, because a new run repeats it.
    remaining = [line for line in lines if line['step'] <= step] if step else []
    if truncated or len(remaining) < len(lines):
        writer.replace(remaining)
    return max((line['step'] for line in lines), default=0)
