"""Charts over the steps: losses, learning rate, gradient, throughput, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from maxlm.formatting import format_loss, format_number, format_percent, format_si
from maxlm.reporting.charts import Chart, Series, lower_title
from maxlm.reporting.overfitting import THRESHOLD
from maxlm.reporting.run_summary import ReportedRun, comparable


class _Metric(NamedTuple):
    """A chart of one metric."""

    name: str
    title: str
    unit: str
    factor: float = 1.0
    scale: Literal['auto', 'zero'] = 'auto'
    smooth: bool = True


_METRICS = (
    # Metrics of GRPO, DPO and reward models.
    _Metric('rollout/reward', 'Reward', 'mean over responses'),
    _Metric('eval/accuracy', 'Accuracy', '% of held-out prompts', factor=100, scale='zero', smooth=False),
    _Metric(
        'eval/rewards/accuracies', 'Accuracy', '% of held-out pairs or answers', factor=100, scale='zero', smooth=False
    ),
    _Metric('eval/reward', 'Reward of greedy answers', 'mean over held-out prompts', smooth=False),
    _Metric('rollout/mean_length', 'Response length', 'tokens', scale='zero'),
    _Metric('train/entropy', 'Entropy', 'nats per sampled token', scale='zero'),
    _Metric('train/kl', 'KL divergence from the initial model', 'nats per token', scale='zero'),
    _Metric('train/rewards/margins', 'Reward margin', 'chosen minus rejected'),
    _Metric('train/rewards/mean', 'Score', 'mean over both answers of a pair'),
    _Metric('train/max_expert_load', 'Expert load', 'largest divided by mean', scale='zero'),
    _Metric('train/router_entropy', 'Router entropy', 'nats', scale='zero'),
    _Metric('train/dropped_tokens', 'Dropped selections', '% beyond the capacity of experts', factor=100, scale='zero'),
    _Metric('train/learning_rate', 'Learning rate', '', scale='zero', smooth=False),
    _Metric('train/grad_norm', 'Gradient norm', 'before clipping'),
    _Metric('perf/tokens_per_second', 'Throughput', 'tokens/s', scale='zero'),
    _Metric('perf/mfu', 'MFU', '% of the peak, causal attention', factor=100, scale='zero'),
    _Metric('memory/peak_gib', 'Device memory', 'GiB, peak so far', scale='zero', smooth=False),
    _Metric('perf/data_loading_seconds', 'Data loading time', 'ms per step', factor=1000, scale='zero'),
)
# Maximum number of sources in a chart, so that it stays readable. The table contains all sources.
_MAX_SOURCES = 12


def loss_charts(runs: Sequence[ReportedRun]) -> tuple[list[Chart], list[str]]:
    """Returns one chart for each group of runs with comparable losses, and the reasons why there are several."""
    groups, reasons = comparable([run for run in runs if run.training or run.validation])
    charts = [_loss(group, _names(group, groups), len(runs) == 1) for group in groups]
    return [chart for chart in charts if chart], reasons


def metric_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Returns one chart for each metric that the runs have, besides losses."""
    is_single = len(runs) == 1
    charts = []
    for one in _METRICS:
        series = [
            Series(
                lower_title(one.title) if is_single else run.name,
                run.metric(one.name, one.factor),
                run.color,
                smooth=one.smooth,
            )
            for run in runs
        ]
        charts.append(Chart(one.title, one.unit, series, marks=runs[0].marks if is_single else (), scale=one.scale))
    return [chart for chart in charts if chart]


def source_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Returns a chart with a curve per source for one run, or a chart per source with a curve per run for several."""
    charts = []
    for prefix, title in (('train/loss', 'Training loss'), ('eval/loss', 'Validation loss')):
        dots = prefix == 'eval/loss'
        names = list(dict.fromkeys(name for run in runs for name in run.sources(prefix)))[:_MAX_SOURCES]
        if len(runs) == 1:
            series = [
                Series(name, runs[0].metric(f'{prefix}/{name}'), number, dots=dots, smooth=True)
                for number, name in enumerate(names)
            ]
            charts.append(Chart(f'{title} by source', 'nats/token', series, marks=runs[0].marks, scale='loss'))
            continue
        for name in names:
            metric = f'{prefix}/{name}'
            groups, _ = comparable([run for run in runs if run.metric(metric)], source=name)
            for group in groups:
                series = [Series(run.name, run.metric(metric), run.color, dots=dots, smooth=True) for run in group]
                charts.append(Chart(f'{title}: {name}{_names(group, groups)}', 'nats/token', series, scale='loss'))
    return [chart for chart in charts if chart]


def source_rows(run: ReportedRun) -> list[list[str]]:
    """Returns source, tokens, fraction of windows, epochs, last training loss and last validation loss."""
    tokens = {name: count for name, count, _ in run.dataset}
    return [
        [
            name,
            format_si(tokens.get(name)),
            format_percent(run.last(f'data/fraction/{name}')),
            format_number(run.last(f'data/epoch/{name}')),
            format_loss(run.last(f'train/loss/{name}')),
            format_loss(run.last(f'eval/loss/{name}')),
        ]
        for name in sorted({*run.sources('train/loss'), *run.sources('eval/loss')})
    ]


def overfitting_note(run: ReportedRun) -> str:
    """Returns a remark on the validation loss of a run that does not overfit; '' with too few evaluations."""
    if run.overfitting or run.best is None or len(run.validation) < 4 or not run.predicts_tokens:
        return ''
    step, best = run.best
    last = run.last('eval/loss')
    if last is not None and last > best * (1 + THRESHOLD):
        rose = f'The validation loss rose from {best:.3f} at step {step:,.0f} to {last:.3f}'
        return f'{rose}, but not while the training loss fell: no sign of overfitting.'
    return 'No overfitting: the validation loss did not rise while the training loss fell.'


def _names(group: Sequence[ReportedRun], groups: Sequence[Sequence[ReportedRun]]) -> str:
    """Returns a suffix for a chart's title that names its runs, if there are several charts."""
    return f', {" and ".join(run.name for run in group)}' if len(groups) > 1 else ''


def _loss(runs: Sequence[ReportedRun], names: str, is_single: bool) -> Chart:
    series = []
    for run in runs:
        prefix = '' if is_single else f'{run.name}: '
        series.append(Series(f'{prefix}training', run.training, run.color, smooth=True))
        best = run.best
        bits = run.bits_per_byte(best[1]) if best and run.predicts_tokens else None
        per_byte = '' if bits is None else f' = {format_loss(bits)} bits per byte'
        legend = f'(best {format_loss(best[1])}{per_byte} at step {best[0]:,.0f}, circled)' if best else ''
        color, circled = 1 if is_single else run.color, best[0] if best else None
        series.append(Series(f'{prefix}validation', run.validation, color, dots=True, best=circled, legend=legend))
    if is_single and (entropy := runs[0].unigram_entropy) and runs[0].predicts_tokens:
        # The loss of a model that only knows the frequencies of the tokens.
        steps = [step for points in (runs[0].training, runs[0].validation) for step, _ in points]
        series.append(Series('unigram entropy', [(step, entropy) for step in sorted({min(steps), max(steps)})], 2))
    overfitting = runs[0].overfitting if is_single else None
    return Chart(
        f'Training and validation loss{names}',
        'nats/token' if all(run.predicts_tokens for run in runs) else 'training objective',
        series,
        marks=runs[0].marks if is_single else (),
        shade=(overfitting.since, overfitting.until) if overfitting else None,
        scale='loss',
        wide=True,
    )
