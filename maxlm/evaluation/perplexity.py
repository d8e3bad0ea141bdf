"""Perplexity of held-out text: its loss by window, by source and by position.

Shapes: A microbatches, B rows of a microbatch, T length, W windows, S sources, K position classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from maxlm.config.schema import Config
from maxlm.evaluation.statistics import Measure, mean_of
from maxlm.parallel.layout import Layout
from maxlm.training.batch import Batch
from maxlm.training.forward import make_log_probs
from maxlm.training.gradients import split_micro_batches
from maxlm.training.state import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HeldOut(NamedTuple):
    """Sums of losses in nats and of token weights, float64.

    Position class k contains the tokens that are predicted from 2^k to 2^(k+1) - 1 tokens.

    Attributes:
        loss_W: sum of losses per window.
        tokens_W: sum of token weights per window.
        source_W: source index of each window.
        class_loss_K: sum of losses per position class.
        class_tokens_K: sum of token weights per position class.
        seq_len: length of a window, in tokens.
    """

    loss_W: np.ndarray
    tokens_W: np.ndarray
    source_W: np.ndarray
    class_loss_K: np.ndarray
    class_tokens_K: np.ndarray
    seq_len: int

    def loss(self) -> Measure:
        """Returns nats per token. The standard error treats windows as independent."""
        return _mean('loss', self.loss_W, self.tokens_W)

    def source_losses(self, names: Iterable[str]) -> list[Measure]:
        """Returns nats per token of each source. Sources without tokens are omitted."""
        measures = []
        for number, name in enumerate(names):
            is_source = (self.source_W == number) & (self.tokens_W > 0)
            if is_source.any():
                measures.append(_mean(f'loss/{name}', self.loss_W[is_source], self.tokens_W[is_source]))
        return measures

    def by_position(self) -> list[tuple[int, int, float]]:
        """Returns (first, last, loss) for each position class, where first and last are numbers of context tokens."""
        return [
            (2**k, min(2 ** (k + 1) - 1, self.seq_len), float(loss / tokens))
            for k, (loss, tokens) in enumerate(zip(self.class_loss_K, self.class_tokens_K, strict=True))
            if tokens
        ]


def make_token_losses(config: Config, layout: Layout) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """Returns a jitted function (params, batch) → arrays of per-token losses.

    The arrays are the loss in nats of each token, its weight and its position, [A, B, T]. If the batch has sources,
    they are included, [A, B]. `make_eval_step` sums the same losses.
    """
    log_probs = make_log_probs(config, layout)

    def token_losses(params: Params, batch: Batch) -> dict[str, jax.Array]:
        micro_batches = split_micro_batches(batch, config.rounds, layout)

        def scan_step(_: None, micro_batch: Batch) -> tuple[None, jax.Array]:
            return None, -log_probs(params, None, micro_batch, None).log_probs_BT

        _, loss_ABT = jax.lax.scan(scan_step, None, micro_batches)
        # With a sharded sequence length, all of these arrays have the same permuted column order.
        names = [name for name in ('weights', 'positions', 'sources') if name in micro_batches]
        return {'loss': loss_ABT, **{name: micro_batches[name] for name in names}}

    return jax.jit(token_losses, out_shardings=layout.named())


def measure(
    token_losses: Callable[[Params, Batch], dict[str, jax.Array]],
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    layout: Layout,
    global_batch: int,
) -> HeldOut:
    """Evaluates all batches. Windows are in data order, independent of the mesh."""
    windows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    classes, seq_len = np.zeros((2, 64)), 0
    pending: dict[str, jax.Array] | None = None

    def collect(losses: dict[str, jax.Array]) -> None:
        nonlocal classes, seq_len
        arrays = {name: _flatten_micro_batches(np.asarray(x)) for name, x in jax.device_get(losses).items()}
        weights = arrays['weights'].astype(np.float64)
        # A selection instead of a product, because losses of unpredicted tokens may be NaN or infinite.
        loss = np.where(weights > 0, arrays['loss'].astype(np.float64) * weights, 0.0)
        windows.append((loss.sum(axis=1), weights.sum(axis=1), arrays.get('sources', np.zeros(len(loss)))))
        seq_len = arrays['positions'].shape[1]
        position_class = np.floor(np.log2(arrays['positions'] + 1)).astype(int).ravel()
        classes += [np.bincount(position_class, x.ravel(), minlength=64) for x in (loss, weights)]

    for batch in batches:
        losses = token_losses(params, layout.put_batch(batch, global_batch))
        # The device computes this batch while the host sums the previous one.
        if pending is not None:
            collect(pending)
        pending = losses
    if pending is not None:
        collect(pending)
    loss_W, tokens_W, source_W = (np.concatenate(parts) for parts in zip(*windows, strict=True))
    num_classes = max(np.flatnonzero(classes[1]).tolist(), default=0) + 1
    class_loss_K, class_tokens_K = classes[:, :num_classes]
    return HeldOut(loss_W, tokens_W, source_W, class_loss_K, class_tokens_K, seq_len)


def bits_per_byte(loss: Measure, tokens_per_byte: float) -> Measure:
    """Converts nats per token to bits per byte of text."""
    factor = tokens_per_byte / math.log(2)
    values = None if loss.values is None else loss.values * factor
    error = None if loss.error is None else loss.error * factor
    return Measure('bits_per_byte', loss.value * factor, error, values, loss.weights)


def draw_positions(curves: dict[str, list[tuple[int, int, float]]], title: str) -> Figure:
    """Returns a figure of the loss over the number of context tokens, with one curve per name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout='constrained')
    axes = figure.subplots()
    axes.set_title(title, fontsize=11, fontweight='bold', loc='left')
    for (name, curve), color, marker in zip(curves.items(), itertools.cycle(COLORS), itertools.cycle('osD^v')):
        middles = [math.sqrt(first * last) for first, last, _ in curve]
        axes.plot(middles, [loss for _, _, loss in curve], color=color, marker=marker, markersize=4, label=name)
    axes.set_xscale('log', base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f'{value:,.0f}')
    axes.set_xlabel('context tokens')
    axes.set_ylabel('loss in nats per token')
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(color='#e4e4e4', linewidth=0.8)
    if len(curves) > 1:
        axes.legend(frameon=False)
    return figure


# Palette of Wong 2011, "Points of view: Color blindness".
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')


def _mean(name: str, sums: np.ndarray, counts: np.ndarray) -> Measure:
    return mean_of(name, np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0), counts)


def _flatten_micro_batches(x: np.ndarray) -> np.ndarray:
    """Reshapes [A, B, …] to [A · B, …] in the order before `split_micro_batches`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
