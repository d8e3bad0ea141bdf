"""Predicts how throughput changes with the number of devices, and with the size of the model."""

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
from maxlm.model.parameters import count_active_parameters, count_parameters
from maxlm.training.flops import training_flops


class Prediction(NamedTuple):
    """Predicted time and memory of one step of a resolved config.

    Attributes:
        step_seconds: seconds of the step.
        memory_bytes: bytes used on the device with the highest use.
        fits: whether the step fits into memory.
    """

    step_seconds: float
    memory_bytes: float
    fits: bool


Predict = Callable[[Config, Chip, int], Prediction]


class ScalingRow(NamedTuple):
    """One point of a curve.

    Attributes:
        kind: `strong` (same batch on more devices), `weak` (batch grows with the devices) or `size` (another model).
        num_devices: number of devices.
        parameters: number of parameters.
        global_batch: sequences in an optimizer step.
        tokens_per_step: tokens in an optimizer step.
        mesh: axes of the mesh that are larger than 1.
        step_seconds: seconds of a step.
        tokens_per_second: throughput of all devices.
        mfu: fraction of the chip's dense bfloat16 peak, counting causal attention.
        efficiency: `mfu` divided by that of the first usable point of the curve.
        memory_bytes: bytes used on a device.
        fits: whether the step fits into memory.
        hours: hours for the configured number of tokens.
        dollars: price of these hours. None: no price is known.
        active_parameters: number of parameters that a token uses; `parameters` without experts.
        refusal: reason why there are no figures; then all of them are 0.
    """

    kind: str
    num_devices: int
    parameters: int
    global_batch: int
    tokens_per_step: int
    mesh: str
    step_seconds: float
    tokens_per_second: float
    mfu: float
    efficiency: float
    memory_bytes: float
    fits: bool
    hours: float
    dollars: float | None
    active_parameters: int
    refusal: str = ''

    @property
    def usable(self) -> bool:
        """Returns True if the run could be started."""
        return self.fits and not self.refusal


class Shape(NamedTuple):
    """Depth and width of a model."""

    num_layers: int
    dim: int


# Shapes of published series, with widths that are multiples of 128: Brown et al. 2020, "Language Models are Few-Shot
# Learners", table 2.1 (0.1B to 2.7B, 13B); Touvron et al. 2023, "LLaMA", table 2 (7B, 33B, 65B), whose widths are 102
# to 128 times the depth. The names are nominal sizes; the exact number of parameters depends on the config's other
# keys.
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
    """A size of the model family and its predicted performance.

    Attributes:
        config: resolved config, unless the row is a refusal.
        row: predicted performance.
    """

    config: Config
    row: ScalingRow


class Data(NamedTuple):
    """Values that a config takes from the data.

    Attributes:
        vocab_size: number of token ids.
        windows: training sequences in one epoch.
    """

    vocab_size: int
    windows: int


def sweep(
    config: Config, chip: Chip, counts: Sequence[int], predict: Predict, data: Data, *, price: float | None = None
) -> list[ScalingRow]:
    """Predicts strong and weak scaling over numbers of devices; all runs train on the configured number of tokens.

    Args:
        config: config as returned by `build`.
        chip: kind of device.
        counts: numbers of devices. In weak scaling the smallest has the configured batch, and larger ones have
            proportionally more.
        predict: function that returns the time and memory of a resolved config's step.
        data: values that the config takes from the data.
        price: dollars per device-hour. None: the price of the built-in table.

    Raises:
        InputError: a number of devices is less than 1.
    """
    counts = sorted(set(counts))
    if not counts or counts[0] < 1:
        raise InputError(f'--sweep={",".join(map(str, counts))}: invalid numbers of devices; use numbers of at least 1')
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
    """Predicts other depths and widths of the config's family on the same devices; arguments as in `sweep`."""
    resized = [dataclasses.replace(config, model=resize(config.model, shape)) for shape in shapes]
    points = [_point('size', other, num_devices, chip, predict, data, price) for other in resized]
    rows = _with_efficiency([point.row for point in points])
    return [point._replace(row=row) for point, row in zip(points, rows, strict=True)]


def resize(model: ModelConfig, shape: Shape) -> ModelConfig:
    """Returns a model of the same family with another depth and width.

    The head dimension, the ratio of key/value heads and the relative feed-forward width stay the same. The feed-forward
    width is rounded to a multiple of 128.
    """
    head_dim = model.head_dim or model.dim // model.num_heads
    num_heads = max(1, round(shape.dim / head_dim))
    num_kv_heads = 0
    if model.num_kv_heads and model.num_kv_heads != model.num_heads:
        exact = num_heads * model.num_kv_heads / model.num_heads
        divisors = [heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]
        num_kv_heads = min(divisors, key=lambda heads: abs(math.log(heads / exact)))
    ffn_dim, expert_ffn_dim = (
        round(width * shape.dim / model.dim / 128) * 128 for width in (model.ffn_dim, model.expert_ffn_dim)
    )
    if model.expert_ffn_dim:
        expert_ffn_dim = max(128, expert_ffn_dim)
    longest = max(len(model.attention_pattern), len(model.value_embedding_pattern))
    return dataclasses.replace(
        model,
        num_layers=max(shape.num_layers, longest),
        dim=shape.dim,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        ffn_dim=ffn_dim,
        expert_ffn_dim=expert_ffn_dim,
    )


def spread(config: Config, chip: Chip, num_devices: int, data: Data) -> Config:
    """Resolves the config for `num_devices` devices.

    The mesh axis that is -1, or else the largest of the axes that split the batch, is set to the remaining devices. If
    the batch is too small for that, tensor parallelism grows by 2, 4 or 8 within a node. The micro-batch becomes the
    largest divisor of a device's sequences that is at most the configured size.

    Raises:
        InputError: no such layout divides batch and model. The error describes the first layout.
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
    """Returns the sequences in one optimizer step of a config that need not be resolved."""
    return config.train.global_batch_size or config.train.global_batch_size_tokens // config.data.seq_len


def _at_batch(config: Config, batch: int, data: Data) -> Config:
    """Returns the config with another batch size and the same number of tokens."""
    train, seq_len = config.train, config.data.seq_len
    tokens = train.num_tokens
    if train.num_steps:
        tokens = train.num_steps * global_batch(config) * seq_len
    elif train.num_epochs:
        tokens = max(1, round(train.num_epochs * data.windows)) * seq_len
    train = dataclasses.replace(train, num_steps=0, num_tokens=tokens, num_epochs=0.0)
    return dataclasses.replace(
        config, train=dataclasses.replace(train, global_batch_size=batch, global_batch_size_tokens=0)
    )


def _resolve(config: Config, chip: Chip, num_devices: int, data: Data) -> Config:
    mesh = resolve_mesh(config.mesh, num_devices)
    per_device, limit = (
        global_batch(config) // (mesh.replica * mesh.data * mesh.fsdp * mesh.expert),
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
    batch, seq_len = global_batch(config), config.data.seq_len
    try:
        config = spread(config, chip, num_devices, data)
    except InputError as error:
        nothing = ScalingRow(
            kind, num_devices, 0, batch, batch * seq_len, '', 0, 0, 0, 0, 0, False, 0, None, 0, str(error)
        )
        return SizePoint(config, nothing)
    prediction = predict(config, chip, num_devices)
    speed = batch * seq_len / prediction.step_seconds
    flops = training_flops(config.model, seq_len).causal
    hours = config.train.num_steps * prediction.step_seconds / 3600
    if price is None and has_price(chip):
        price = price_per_hour(chip).dollars
    row = ScalingRow(
        kind=kind,
        num_devices=num_devices,
        parameters=count_parameters(config.model),
        global_batch=batch,
        tokens_per_step=batch * seq_len,
        mesh=' '.join(f'{axis}={size}' for axis, size in config.mesh.sizes.items() if size > 1) or 'one device',
        step_seconds=prediction.step_seconds,
        tokens_per_second=speed,
        mfu=speed * flops / (num_devices * chip.peak(config.model.dtype).tflops * 1e12),
        efficiency=0.0,
        memory_bytes=prediction.memory_bytes,
        fits=prediction.fits,
        hours=hours,
        dollars=None if price is None else price * hours * num_devices,
        active_parameters=count_active_parameters(config.model),
    )
    return SizePoint(config, row)


def _with_efficiency(curve: list[ScalingRow]) -> list[ScalingRow]:
    base = next((row.mfu for row in curve if row.usable), 0.0) or next((row.mfu for row in curve if row.mfu), 0.0)
    return [row._replace(efficiency=row.mfu / base) if base else row for row in curve]
