"""How a run gets faster with more devices, and slower with larger models of its family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from maxlm.config.mesh import resolve_mesh
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config, ModelConfig
from maxlm.errors import InputError
from maxlm.hardware.chips import Chip
from maxlm.hardware.prices import has_price, price_per_hour
from maxlm.planning.estimate.flops import training_flops
from maxlm.planning.estimate.parameters import count_parameters


class Prediction(NamedTuple):
    """What is expected of one step of a resolved config on so many devices."""

    step_seconds: float
    # Of the fullest device.
    memory_bytes: float
    fits: bool


Predict = Callable[[Config, Chip, int], Prediction]


class ScalingRow(NamedTuple):
    """One point of a curve."""

    # strong: the same batch on more devices. weak: the batch grows with them. size: another model.
    kind: str
    num_devices: int
    parameters: int
    # Sequences and tokens in an optimizer step.
    global_batch: int
    tokens_per_step: int
    # The layout: axes of the mesh above 1.
    mesh: str
    step_seconds: float
    tokens_per_second: float
    # Of the chip's dense bfloat16 peak, counting causal attention.
    mfu: float
    # The same against the first point of the curve that fits.
    efficiency: float
    memory_bytes: float
    fits: bool
    # For as many tokens as configured; dollars None = no price is known.
    hours: float
    dollars: float | None
    # Why there are no figures; then all of them are 0.
    refusal: str = ''

    @property
    def usable(self) -> bool:
        """Whether such a run could be started."""
        return self.fits and not self.refusal


class Shape(NamedTuple):
    """Depth and width of a model."""

    num_layers: int
    dim: int


# Of published series, each width a multiple of 128: Brown et al. 2020, "Language Models are Few-Shot Learners", table
# 2.1 (0.1B to 2.7B, 13B); Touvron et al. 2023, "LLaMA", table 2 (7B, 33B, 65B), whose widths are 102 to 128 times the
# depth. Sizes are those of such models; the exact number follows from the config's other keys.
SHAPES: dict[str, Shape] = {
    '0.1B': Shape(12, 768),
    '0.4B': Shape(24, 1024),
    '0.8B': Shape(24, 1536),
    '1.3B': Shape(24, 2048),
    '2.7B': Shape(32, 2560),
    '7B': Shape(32, 4096),
    '13B': Shape(40, 5120),
    '33B': Shape(60, 6656),
    '65B': Shape(80, 8192),
}


class SizePoint(NamedTuple):
    """A size of the family and how it runs."""

    # Resolved, unless the row is a refusal.
    config: Config
    row: ScalingRow


class Data(NamedTuple):
    """What a config leaves open until there is data: token ids, and training windows in one epoch."""

    vocab_size: int
    windows: int


def sweep(
    config: Config, chip: Chip, counts: Sequence[int], predict: Predict, data: Data, *, price: float | None = None
) -> list[ScalingRow]:
    """Strong and weak scaling over numbers of devices; all runs see as many tokens as the config says.

    Args:
        config: as `build` returned it.
        chip: the kind of device.
        counts: numbers of devices; for weak scaling the smallest has the configured batch, others in proportion.
        predict: seconds and memory of a step of a resolved config.
        data: for what the config leaves open.
        price: dollars per device-hour; None = the table's.

    Raises:
        InputError: a number of devices is not at least 1.
    """
    counts = sorted(set(counts))
    if not counts or counts[0] < 1:
        raise InputError(f'a sweep over {", ".join(map(str, counts)) or "no"} devices: give numbers of at least 1')
    batch = global_batch(config)
    rows: list[ScalingRow] = []
    for kind in ('strong', 'weak'):
        batches = [batch if kind == 'strong' else batch * count // counts[0] for count in counts]
        configs = [_at_batch(config, size, data) for size in batches]
        points = [_point(kind, *pair, chip, predict, data, price) for pair in zip(configs, counts, strict=True)]
        rows += _with_efficiency([point.row for point in points])
    return rows


def sweep_sizes(
    config: Config,
    chip: Chip,
    num_devices: int,
    predict: Predict,
    data: Data,
    *,
    shapes: Sequence[Shape] = tuple(SHAPES.values()),
    price: float | None = None,
) -> list[SizePoint]:
    """The config's family in other depths and widths on the same devices; arguments as in `sweep`."""
    resized = [dataclasses.replace(config, model=resize(config.model, shape)) for shape in shapes]
    points = [_point('size', other, num_devices, chip, predict, data, price) for other in resized]
    rows = _with_efficiency([point.row for point in points])
    return [point._replace(row=row) for point, row in zip(points, rows, strict=True)]


def resize(model: ModelConfig, shape: Shape) -> ModelConfig:
    """A model of the same family with another depth and width.

    The width of a head stays, and so do the proportions of key/value heads and of the feed-forward's inner width, which
    is rounded to a multiple of 128.
    """
    head_dim = model.head_dim or model.dim // model.num_heads
    num_heads = max(1, round(shape.dim / head_dim))
    num_kv_heads = 0
    if model.num_kv_heads and model.num_kv_heads != model.num_heads:
        wanted = num_heads * model.num_kv_heads / model.num_heads
        divisors = [heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]
        num_kv_heads = min(divisors, key=lambda heads: abs(math.log(heads / wanted)))
    ffn_dim = round(model.ffn_dim * shape.dim / model.dim / 128) * 128 if model.ffn_dim else 0
    period = len(model.attention_pattern)
    return dataclasses.replace(
        model,
        num_layers=max(shape.num_layers, period),
        dim=shape.dim,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        ffn_dim=ffn_dim,
    )


def spread(config: Config, chip: Chip, num_devices: int, data: Data) -> Config:
    """The config resolved for so many devices.

    The axis of the mesh that is -1, or else the largest of those that split the batch, takes what the others leave.
    Where the batch is too small for that, blocks are split over 2, 4 or 8 times as many devices of a node. The
    micro-batch becomes the largest that divides a device's sequences and is no larger than configured.

    Raises:
        InputError: no such layout divides batch and model; it is about the first of them.
    """
    mesh = config.mesh
    axis = next((axis for axis, size in mesh.sizes.items() if size == -1), None)
    axis = axis or max(('fsdp', 'data', 'replica'), key=lambda name: mesh.sizes[name])
    refusals = []
    for factor in (1, 2, 4, 8):
        tensor = mesh.tensor * factor
        if factor > 1 and (axis == 'tensor' or tensor > chip.per_node):
            break
        sizes: dict[str, Any] = {**mesh.sizes, 'tensor': tensor, axis: -1}
        wider = dataclasses.replace(config, mesh=dataclasses.replace(mesh, **sizes))
        try:
            return _resolve(wider, chip, num_devices, data)
        except InputError as error:
            refusals.append(error)
    raise refusals[0]


def global_batch(config: Config) -> int:
    """Sequences in one optimizer step of a config that need not be resolved."""
    return config.train.global_batch_size or config.train.global_batch_size_tokens // config.data.seq_len


def _at_batch(config: Config, batch: int, data: Data) -> Config:
    """The same number of tokens in steps of another batch."""
    train, window = config.train, config.data.seq_len
    tokens = train.num_tokens
    if train.num_steps:
        tokens = train.num_steps * global_batch(config) * window
    elif train.num_epochs:
        tokens = max(1, round(train.num_epochs * data.windows)) * window
    train = dataclasses.replace(train, num_steps=0, num_tokens=tokens, num_epochs=0.0)
    return dataclasses.replace(
        config, train=dataclasses.replace(train, global_batch_size=batch, global_batch_size_tokens=0)
    )


def _resolve(config: Config, chip: Chip, num_devices: int, data: Data) -> Config:
    mesh = resolve_mesh(config.mesh, num_devices)
    per_device, limit = (
        global_batch(config) // (mesh.replica * mesh.data * mesh.fsdp),
        config.train.per_device_batch_size,
    )
    if limit and per_device:
        micro_batch = max(size for size in range(1, min(limit, per_device) + 1) if per_device % size == 0)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, per_device_batch_size=micro_batch))
    return resolve(
        config, platform=chip.platform, num_devices=num_devices, capability=chip.capability, **data._asdict()
    )


def _point(
    kind: str, config: Config, num_devices: int, chip: Chip, predict: Predict, data: Data, price: float | None
) -> SizePoint:
    batch, window = global_batch(config), config.data.seq_len
    try:
        config = spread(config, chip, num_devices, data)
    except InputError as error:
        nothing = ScalingRow(kind, num_devices, 0, batch, batch * window, '', 0, 0, 0, 0, 0, False, 0, None, str(error))
        return SizePoint(config, nothing)
    prediction = predict(config, chip, num_devices)
    speed = batch * window / prediction.step_seconds
    flops = training_flops(config.model, window).causal
    hours = config.train.num_steps * prediction.step_seconds / 3600
    if price is None and has_price(chip):
        price = price_per_hour(chip).dollars
    row = ScalingRow(
        kind=kind,
        num_devices=num_devices,
        parameters=count_parameters(config.model),
        global_batch=batch,
        tokens_per_step=batch * window,
        mesh=' '.join(f'{axis}={size}' for axis, size in config.mesh.sizes.items() if size > 1) or 'one device',
        step_seconds=prediction.step_seconds,
        tokens_per_second=speed,
        mfu=speed * flops / (num_devices * chip.tflops * 1e12),
        efficiency=0.0,
        memory_bytes=prediction.memory_bytes,
        fits=prediction.fits,
        hours=hours,
        dollars=None if price is None else price * hours * num_devices,
    )
    return SizePoint(config, row)


def _with_efficiency(curve: list[ScalingRow]) -> list[ScalingRow]:
    base = next((row.mfu for row in curve if row.usable), 0.0) or next((row.mfu for row in curve if row.mfu), 0.0)
    return [row._replace(efficiency=row.mfu / base) if base else row for row in curve]
