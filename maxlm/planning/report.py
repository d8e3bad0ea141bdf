"""Formats a forecast as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from maxlm.config.schema import UNDECIDED_STEPS
from maxlm.formatting import format_bytes, format_duration, format_si, plural
from maxlm.hardware.prices import has_price, price_per_hour
from maxlm.model.parameters import count_active_parameters, count_parameters, parameters_text
from maxlm.planning.compiled.traffic import bytes_by_cause
from maxlm.planning.cost import DEFAULT_TERMS, HOUR, Cost, PricingTerms, estimate_cost, estimate_step_cost, tokens_for
from maxlm.planning.estimate.state_bytes import checkpoint_bytes
from maxlm.planning.explain import program_warnings
from maxlm.planning.forecast import Forecast, faster_dtype
from maxlm.planning.search import Override

KINDS = ('parameters', 'moments', 'average', 'gradients', 'activations', 'temporary', 'batch', 'replay', 'reward_model')


def cost_of(forecast: Forecast, terms: PricingTerms) -> Cost:
    """Returns the cost of a complete run. If `terms` has no price, the config's price is used."""
    target = forecast.target
    config = forecast.config
    train = config.train
    if terms.price is None and train.price_per_hour:
        terms = dataclasses.replace(terms, price=train.price_per_hour)
    if train.num_steps == UNDECIDED_STEPS:
        tokens = _tokens_for(forecast, terms, dollars=train.dollars or None, hours=train.hours or None)
        num_steps = max(1, int(tokens // (train.global_batch_size * config.data.seq_len)))
        config = dataclasses.replace(config, train=dataclasses.replace(train, num_steps=num_steps))
    return estimate_cost(
        config,
        forecast.time.total,
        target.chip,
        target.num_devices,
        state_bytes=checkpoint_bytes(forecast.config),
        num_machines=target.num_islands,
        terms=terms,
    )


def budget_text(forecast: Forecast, terms: PricingTerms, *, dollars: float | None, hours: float | None) -> str:
    """Returns the number of tokens that a budget buys, and the option that sets it."""
    config = forecast.config
    tokens = _tokens_for(forecast, terms, dollars=dollars, hours=hours)
    per_step = config.train.global_batch_size * config.data.seq_len
    steps = int(tokens // per_step)
    budget = f'${dollars:,.0f}' if dollars else f'{hours:,.3g} h'
    return f'budget of {budget}: {format_si(steps * per_step)} tokens, --config.train.num_steps={steps}'


def _tokens_for(forecast: Forecast, terms: PricingTerms, *, dollars: float | None, hours: float | None) -> float:
    config, target = forecast.config, forecast.target
    step_cost = estimate_step_cost(
        config,
        forecast.time.total,
        target.chip,
        target.num_devices,
        state_bytes=checkpoint_bytes(config),
        num_machines=target.num_islands,
        terms=terms,
    )
    price = terms.price or (price_per_hour(target.chip).dollars if dollars and has_price(target.chip) else 0.0)
    return tokens_for(config, step_cost, target.num_devices, dollars=dollars, hours=hours, price=price)


def as_json(forecast: Forecast, cost: Cost, advice: Sequence[Override] | None) -> dict[str, Any]:
    """Returns a JSON-serializable dictionary, in bytes, seconds and dollars."""
    causal, full = forecast.mfu
    memory = forecast.memory
    kernels = forecast.program.traffic if forecast.program else []
    return {
        'target': forecast.target.spec,
        'devices': forecast.target.num_devices,
        'parameters': count_parameters(forecast.config.model),
        'active_parameters': count_active_parameters(forecast.config.model),
        'fits': forecast.fits,
        'is_estimate': memory.is_estimate,
        'memory': {
            **{kind: getattr(memory, kind) for kind in KINDS},
            'total': memory.total,
            'host': memory.host,
            'process': forecast.process,
            'available': forecast.available,
            'chip': forecast.target.chip.memory,
        },
        'step_seconds': forecast.time.total,
        'time': forecast.time._asdict(),
        'flops': {
            'executed': forecast.work.all_flops,
            'attention': forecast.work.attention_flops,
            **({'compiled': forecast.program.flops} if forecast.program else {}),
        },
        'traffic': forecast.work.memory_bytes,
        **({'traffic_by_cause': bytes_by_cause(kernels)} if forecast.program else {}),
        # Only the kernels of GPUs are counted.
        **({'kernels': sum(kernel.executions for kernel in kernels)} if kernels else {}),
        'warnings': program_warnings(forecast),
        'transfers': [transfer._asdict() for transfer in forecast.work.transfers],
        'tokens_per_second': forecast.tokens_per_second,
        'mfu': causal,
        'mfu_full': full,
        'hours': cost.hours,
        'dollars': cost.dollars,
        'cost': {
            **cost._asdict(),
            'price': cost.price and cost.price._asdict(),
            'spot_price': cost.spot_price and cost.spot_price._asdict(),
        },
        'advice': None if advice is None else [change.override for change in advice],
    }


def as_text(forecast: Forecast, cost: Cost) -> str:
    """Returns paragraphs on the run, its memory, work, time and cost."""
    lines = [*_run(forecast), *_memory(forecast), *_work(forecast), *_time(forecast), *_cost(cost)]
    lines += [('warning', text) for text in program_warnings(forecast)]
    width = max(len(label) for label, _ in lines)
    return '\n'.join(f'{label:<{width}}  {text}' for label, text in lines)


def startup_text(forecast: Forecast) -> list[str]:
    """Returns the lines on memory, speed and cost that a run logs when it starts."""
    lines = _memory(forecast)
    if math.isfinite(forecast.time.total):
        lines += [*_time(forecast), *_cost(cost_of(forecast, DEFAULT_TERMS))]
    lines += [('warning', text) for text in program_warnings(forecast)]
    return [f'{label:<{len("checkpoint")}}  {text}' for label, text in lines]


def suggestions_text(changes: Sequence[Override]) -> str:
    """Returns the options to add to the command."""
    return ' '.join(change.override for change in changes)


def _operations(number: float) -> str:
    return f'{number / 1e12:.3g} TFLOP'


def _run(forecast: Forecast) -> list[tuple[str, str]]:
    config, target = forecast.config, forecast.target
    islands = ''
    if target.num_islands > 1:
        islands = f' in {target.num_islands} {"nodes" if target.chip.platform == "gpu" else "slices"}'
    mesh = ' '.join(f'{axis}={size}' for axis, size in config.mesh.sizes.items() if size > 1) or 'one device'
    train, model = config.train, config.model
    batch = (
        f'{train.global_batch_size} × {config.data.seq_len} tokens per step in '
        f'{plural(config.accumulation, "micro-batch")} of {train.per_device_batch_size} per device'
    )
    return [
        ('target', f'{target.num_devices} × {target.chip.name}{islands}'),
        (
            'run',
            f'{parameters_text(model)}, mesh {mesh}; {batch}, model.remat_policy={model.remat_policy}'
            f'{", train.deterministic=true" if train.deterministic else ""}',
        ),
    ]


def _memory(forecast: Forecast) -> list[tuple[str, str]]:
    memory = forecast.memory
    how = 'estimated' if memory.is_estimate else 'as compiled'
    if forecast.compiled is not None:
        how += f' in {forecast.compiled.seconds:.0f} s'
    over = forecast.needed - forecast.available
    conclusion = 'fits' if over <= 0 else f'DOES NOT FIT: {format_bytes(over)} over the limit'
    chip = format_bytes(forecast.target.chip.memory)
    kinds = ', '.join(
        f'{kind} {format_bytes(size)}' for kind in KINDS if (size := getattr(memory, kind)) > 0.002 * memory.total
    )
    lines = [
        (
            'memory',
            f'{conclusion}: {format_bytes(forecast.needed)} of {format_bytes(forecast.available)} usable out of '
            f'{chip}, {how}',
        ),
        ('', kinds),
    ]
    if forecast.process:
        lines.append(('', f'with {format_bytes(forecast.process)} of the process: libraries and compiled programs'))
    if memory.host:
        lines.append(('', f'plus {format_bytes(memory.host)} of host memory per device'))
    return lines


def _work(forecast: Forecast) -> list[tuple[str, str]]:
    work = forecast.work
    source = 'by formula' if forecast.program is None else 'in the program'
    counted = f'{_operations(work.all_flops)} in matrix products {source}'
    formula = forecast.formula
    traffic = f'{format_bytes(work.memory_bytes)} of memory traffic'
    if forecast.program is not None and forecast.program.traffic and formula is not None:
        traffic += f' (by formula {format_bytes(formula.memory_bytes)})'
    lines = [('work', f'per step and device: {counted}, {traffic}')]
    sums: dict[tuple[str, tuple[str, ...], bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for transfer in work.transfers:
        total = sums[transfer.kind, transfer.axes, transfer.is_async]
        total[0] += transfer.sent
        total[1] += transfer.count
    for (kind, axes, is_async), (sent, count) in sorted(sums.items(), key=lambda item: -item[1][0]):
        if sent < 0.001 * max(total[0] for total in sums.values()):
            continue
        along = ' · '.join(axes) or 'other device groups'
        waits = 'overlapped with compute' if is_async else 'not overlapped'
        lines.append(('', f'sends {format_bytes(sent)} in {count:,.0f} × {kind} along {along}, {waits}'))
    return lines


def _time(forecast: Forecast) -> list[tuple[str, str]]:
    time, (causal, full) = forecast.time, forecast.mfu
    parts = ', '.join(
        f'{name} {seconds:.3g}' for name, seconds in time._asdict().items() if seconds > 0.0005 * time.total
    )
    mfu_text = f'; MFU {causal:.1%} (causal attention), {full:.1%} (full attention)' if causal else ''
    lines = [
        ('time', f'{time.total:.3g} s per step (estimated): {parts}'),
        ('speed', f'{forecast.tokens_per_second:,.0f} tokens/s{mfu_text}'),
    ]
    if faster := faster_dtype(forecast):
        dtype, seconds = faster
        source = forecast.target.chip.peak(forecast.config.model.dtype).source
        lines.append(
            (
                '',
                f'model.dtype=float32 multiplies in {source}; model.dtype={dtype} would take about {seconds:.3g} s per '
                f'step ({seconds / time.total:.0%})',
            )
        )
    return lines


def _cost(cost: Cost) -> list[tuple[str, str]]:
    lines = [
        (
            'cost',
            f'{cost.steps:,} steps, {format_si(cost.tokens)} tokens: {format_duration(cost.hours * HOUR)}'
            + (
                f', ${cost.dollars:,.0f} at ${cost.price.dollars:.2f} per device-hour ({cost.price.source})'
                if cost.price and cost.price.dollars
                else ''
            ),
        )
    ]
    if cost.dollars_spot is not None and cost.spot_price and cost.hours_spot:
        lines.append(
            (
                '',
                f'on spot devices {format_duration(cost.hours_spot * HOUR)}, ${cost.dollars_spot:,.0f} at '
                f'${cost.spot_price.dollars:.2f} ({cost.spot_price.source})',
            )
        )
    # A cent is not worth a warning, and a local disk has no price.
    storage = ''
    if cost.storage_dollars_per_month >= 0.01:
        storage = f': ${cost.storage_dollars_per_month:.2f} per month in a bucket'
    lines.append(
        (
            'checkpoint',
            f'{format_bytes(cost.checkpoint_bytes)}, written in {format_duration(cost.checkpoint_seconds)} '
            f'during training; {cost.checkpoints_kept} kept{storage}',
        )
    )
    return lines
