"""Curves over the steps: losses, learning rate, gradient, throughput, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from maxlm.formatting import format_loss, format_number, format_percent, format_si
from maxlm.reporting.drawing.curves import scale_by
from maxlm.reporting.drawing.html import Markup, join, note, section, table, tag
from maxlm.reporting.drawing.line_chart import Chart, Series, draw, lower_title
from maxlm.reporting.sections.run_summary import THRESHOLD, ReportedRun, comparable


class _Curve(NamedTuple):
    """A chart of one metric."""

    name: str
    title: str
    unit: str
    factor: float = 1.0
    scale: Literal['linear', 'auto', 'zero', 'loss'] = 'auto'
    smooth: bool = True


_CURVES = (
    # Metrics of GRPO and DPO runs.
    _Curve('rollout/reward', 'Reward', 'mean over responses'),
    _Curve('eval/accuracy', 'Accuracy', '% of held-out prompts', factor=100, scale='zero', smooth=False),
    _Curve('eval/rewards/accuracies', 'Accuracy', '% of held-out pairs', factor=100, scale='zero', smooth=False),
    _Curve('rollout/mean_length', 'Response length', 'tokens', scale='zero'),
    _Curve('train/entropy', 'Entropy', 'nats per sampled token', scale='zero'),
    _Curve('train/kl', 'KL divergence from the initial model', 'nats per token', scale='zero'),
    _Curve('train/rewards/margins', 'Reward margin', 'chosen minus rejected'),
    _Curve('train/learning_rate', 'Learning rate', '', scale='zero', smooth=False),
    _Curve('train/grad_norm', 'Gradient norm', 'before clipping'),
    _Curve('perf/tokens_per_second', 'Throughput', 'tokens/s', scale='zero'),
    _Curve('perf/mfu', 'MFU', '% of the peak, causal attention', factor=100, scale='zero'),
    _Curve('memory/peak_gib', 'Device memory', 'GiB, peak so far', scale='zero', smooth=False),
    _Curve('perf/data_loading_seconds', 'Data loading time', 'ms per step', factor=1000, scale='zero'),
)
# Maximum number of sources in a chart, so that it stays readable. The table contains all sources.
_MAX_SOURCES = 12


def training_curves(runs: Sequence[ReportedRun]) -> Markup:
    """Returns the large loss chart, overfitting, sources and all other curves."""
    show_names = len(runs) > 1
    words = [_overfitting(run, show_names) for run in runs]
    groups, reasons = comparable([run for run in runs if run.training or run.validation])
    if reasons:
        different = ' and '.join(reasons)
        words.append(note(f'Losses of runs with different {different} cannot be compared; they have separate charts.'))
    charts = [draw(_loss(group, _names(group, groups), show_names)) for group in groups]
    return join(
        section('loss', 'Loss', *words, *charts),
        section('sources', 'Loss by source', _by_source(runs), *(_source_table(run, show_names) for run in runs)),
        section('curves', 'Curves', _other_curves(runs)),
    )


def _names(group: Sequence[ReportedRun], groups: Sequence[Sequence[ReportedRun]]) -> str:
    """Returns a suffix for a chart's title that names its runs, if there are several charts."""
    return f', {" and ".join(run.name for run in group)}' if len(groups) > 1 else ''


def _loss(runs: Sequence[ReportedRun], names: str, show_names: bool) -> Chart:
    is_single = not show_names
    series = []
    for run in runs:
        prefix = f'{run.name}: ' if show_names else ''
        series.append(Series(f'{prefix}training', run.training, run.color, smooth=True))
        best = run.best
        legend = f'(best {format_loss(best[1])} at step {best[0]:,.0f}, circled)' if best else ''
        series.append(
            Series(
                f'{prefix}validation',
                run.validation,
                1 if is_single else run.color,
                dots=True,
                best=best[0] if best else None,
                legend=legend,
            )
        )
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


def _overfitting(run: ReportedRun, show_name: bool) -> Markup:
    prefix = f'{run.name}: ' if show_name else ''
    if run.overfitting:
        # The summary shows the sentence on overfitting.
        return Markup('') if show_name else note('Shaded: the steps in which the run overfits.')
    if run.best is None or len(run.validation) < 4 or not run.predicts_tokens:
        return Markup('')
    step, best = run.best
    last = run.last('eval/loss')
    if last is not None and last > best * (1 + THRESHOLD):
        rose = f'The validation loss rose from {best:.3f} at step {step:,.0f} to {last:.3f}'
        return note(prefix, f'{rose}, but not while the training loss fell: no sign of overfitting.')
    return note(prefix, 'No overfitting: the validation loss did not rise while the training loss fell.')


def _other_curves(runs: Sequence[ReportedRun]) -> Markup:
    drawn = [chart for one in _CURVES if (chart := _chart(runs, one))]
    return tag('div', *drawn, class_='charts') if drawn else Markup('')


def _chart(runs: Sequence[ReportedRun], one: _Curve) -> Markup:
    is_single = len(runs) == 1
    series = [
        Series(
            lower_title(one.title) if is_single else run.name,
            scale_by(run.metric(one.name), one.factor),
            run.color,
            smooth=one.smooth,
        )
        for run in runs
    ]
    return draw(Chart(one.title, one.unit, series, marks=runs[0].marks if is_single else (), scale=one.scale))


def _by_source(runs: Sequence[ReportedRun]) -> Markup:
    """Returns a chart with a curve per source for one run, or a chart per source with a curve per run for several."""
    charts = []
    for prefix, title in (('train/loss', 'Training loss'), ('eval/loss', 'Validation loss')):
        dots = prefix == 'eval/loss'
        names = list(dict.fromkeys(name for run in runs for name in run.sources(prefix)))[:_MAX_SOURCES]
        if len(runs) == 1:
            run = runs[0]
            series = [
                Series(name, run.metric(f'{prefix}/{name}'), number, dots=dots, smooth=True)
                for number, name in enumerate(names)
            ]
            charts.append(draw(Chart(f'{title} by source', 'nats/token', series, marks=run.marks, scale='loss')))
            continue
        for name in names:
            metric = f'{prefix}/{name}'
            groups, _ = comparable([run for run in runs if run.metric(metric)], source=name)
            for group in groups:
                series = [Series(run.name, run.metric(metric), run.color, dots=dots, smooth=True) for run in group]
                title_of_group = f'{title}: {name}{_names(group, groups)}'
                charts.append(draw(Chart(title_of_group, 'nats/token', series, scale='loss')))
    drawn = [chart for chart in charts if chart]
    return tag('div', *drawn, class_='charts') if drawn else Markup('')


def _source_table(run: ReportedRun, show_name: bool) -> Markup:
    names = sorted({*run.sources('train/loss'), *run.sources('eval/loss')})
    if not names:
        return Markup('')
    tokens = {name: count for name, count, _ in run.dataset}
    rows = [
        [
            name,
            format_si(tokens.get(name)),
            format_percent(run.last(f'data/fraction/{name}')),
            format_number(run.last(f'data/epoch/{name}')),
            format_loss(run.last(f'train/loss/{name}')),
            format_loss(run.last(f'eval/loss/{name}')),
        ]
        for name in names
    ]
    heading = tag('h3', run.name) if show_name else Markup('')
    header = ['source', 'tokens', 'fraction of windows', 'epochs', 'last training loss', 'last validation loss']
    return join(heading, table(header, rows))
