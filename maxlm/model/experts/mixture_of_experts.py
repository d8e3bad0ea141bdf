"""The mixture-of-experts layer, which replaces the feed-forward of a block (Shazeer et al. 2017).

Shapes: B batch, T length, N = B·T tokens, D dim, F width of an expert, E experts, k experts per token, R rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.model.experts.dispatch import (
    from_rows,
    limit_by_capacity,
    make_exchange,
    send,
    send_back,
    sort_by_expert,
    to_rows,
)
from maxlm.model.experts.expert_linear import Arrays, ExpertLinear
from maxlm.model.experts.grouped_matmul import RowGroups, block_size
from maxlm.model.experts.router import Router, RouterStats, router_stats, select_experts
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.linear import Initializer
from maxlm.model.layers.lora import adapter_of
from maxlm.model.layers.mlp import ACTIVATIONS, FeedForward, recomputed
from maxlm.model.layers.weight_only_quantization import weights_of
from maxlm.parallel.partitioning import Axes, Partitioning


class Experts(nnx.Module):
    """The projections of all experts, dim → expert_ffn_dim → dim; SwiGLU has a third projection."""

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        def linear(name: str, in_dim: int, out_dim: int, axes: tuple[str, str], init: Initializer) -> ExpertLinear:
            return ExpertLinear(
                config.num_experts,
                in_dim,
                out_dim,
                in_axis=axes[0],
                out_axis=axes[1],
                init=init,
                use_bias=config.has_bias('mlp'),
                partitioning=partitioning,
                rngs=rngs,
                adapter=adapter_of(config, f'feedforward.experts.{name}'),
            )

        init, D, F = initializers(config), config.dim, config.expert_ffn_dim
        into, back = ('expert_embed', 'expert_ffn'), ('expert_ffn', 'expert_embed')
        self.gate = linear('gate', D, F, into, init.feedforward) if config.activation in GATED_ACTIVATIONS else None
        self.up = linear('up', D, F, into, init.feedforward)
        self.down = linear('down', F, D, back, init.residual)
        self.activation = recomputed(ACTIVATIONS[config.activation], in_loop=config.scan_layers)

    def linears(self) -> dict[str, ExpertLinear]:
        """Returns the projections by name."""
        gate = {} if self.gate is None else {'gate': self.gate}
        return {**gate, 'up': self.up, 'down': self.down}

    def apply(self, arrays: dict[str, Arrays], x_RD: jax.Array, groups: RowGroups, kind: str) -> jax.Array:
        """Returns the outputs of rows sorted by expert, [R, D]; see `ExpertLinear.apply`."""
        inputs = [
            linear.apply(arrays[name], x_RD, groups, kind) for name, linear in self.linears().items() if name != 'down'
        ]
        with jax.named_scope('activation'):
            h_RF = self.activation(*inputs)
        return self.down.apply(arrays['down'], h_RF, groups, kind)


class MixtureOfExperts(nnx.Module):
    """Router, experts, and shared experts, which process every token."""

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        self.router = Router(config, partitioning=partitioning, rngs=rngs)
        self.experts = Experts(config, partitioning=partitioning, rngs=rngs)
        shared = dataclasses.replace(config, ffn_dim=config.num_shared_experts * config.expert_ffn_dim)
        has_shared = config.num_shared_experts > 0
        self.shared = (
            FeedForward(shared, partitioning=partitioning, rngs=rngs, name='feedforward.shared') if has_shared else None
        )
        self.config = config
        self.is_quantized = weights_of(config) is not None
        self.partitioning = partitioning

    def __call__(
        self, x_BTD: jax.Array, segments_BT: jax.Array | None, *, is_dropless: bool
    ) -> tuple[jax.Array, RouterStats]:
        """Returns the output [B, T, D] and the statistics of the router.

        Each device routes its own tokens, so nothing but the rows of experts on other devices is communicated.

        Args:
            x_BTD: normalized hidden states.
            segments_BT: index of the document of each token; 0 in padding, which no expert processes. None: no padding.
            is_dropless: if True, ignore `model.expert_capacity_factor`.
        """
        partitioning, config = self.partitioning, self.config
        # Rows of a decoding step may not divide over the devices. Then each device processes all of them.
        is_split = len(x_BTD) % partitioning.num_shards('batch') == 0
        rows = ('batch' if is_split else 'activation', 'length')
        logits_BTE = self.router(x_BTD)
        experts = {name: linear.arrays(x_BTD.dtype) for name, linear in self.experts.linears().items()}
        # Each argument with its logical axes.
        arguments: dict[str, tuple[jax.Array, Axes]] = {
            'x_BTD': (x_BTD, (*rows, 'activation')),
            'logits_BTE': (logits_BTE, (*rows, 'routes')),
        }
        is_token_BT = None
        if segments_BT is not None:
            is_token_BT = segments_BT > 0
            arguments['is_token_BT'] = (is_token_BT, rows)
        if self.router.balance_bias is not None:
            arguments['balance_bias_E'] = (self.router.balance_bias[...], ('routes',))
        summed_over = tuple(name for axis in rows for name in partitioning.mesh_axes(axis))

        def on_device(inputs: dict[str, jax.Array], arrays: dict[str, Arrays]) -> tuple[jax.Array, ...]:
            logits_NE = inputs['logits_BTE'].reshape(-1, config.num_experts)
            expert_Nk, weight_Nk = select_experts(logits_NE, inputs.get('balance_bias_E'), config)
            if 'is_token_BT' in inputs:
                expert_Nk = jnp.where(inputs['is_token_BT'].reshape(-1, 1), expert_Nk, config.num_experts)
            y_BTD, num_dropped = self._routed(inputs['x_BTD'], expert_Nk, weight_Nk, arrays, is_dropless)
            load_E = jnp.bincount(expert_Nk.reshape(-1), length=config.num_experts)
            if summed_over:
                load_E, num_dropped = jax.lax.psum((load_E, num_dropped), summed_over)
            return y_BTD, load_E, num_dropped

        in_axes = [_axes(arguments), {name: _axes(arrays) for name, arrays in experts.items()}]
        run = partitioning.per_shard(on_device, in_axes, ((*rows, 'activation'), ('routes',), ()))
        with jax.named_scope('experts'):
            y_BTD, load_E, num_dropped = run(
                _arrays(arguments), {name: _arrays(arrays) for name, arrays in experts.items()}
            )
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        return y_BTD, router_stats(logits_BTE, load_E, num_dropped, is_token_BT, config)

    def _routed(
        self,
        x_BTD: jax.Array,
        expert_Nk: jax.Array,
        weight_Nk: jax.Array,
        arrays: dict[str, Arrays],
        is_dropless: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weighted sum of the experts' outputs, [B, T, D], and the number of dropped selections.

        It runs on each device, within `jax.shard_map`.
        """
        config, partitioning = self.config, self.partitioning
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        num_dropped = jnp.zeros((), jnp.int32)
        if config.expert_capacity_factor and not is_dropless:
            y_NkD, num_dropped = self._limited(x_ND, expert_Nk, arrays, num_sequences=len(x_BTD))
        else:
            y_NkD = self._dropless(x_ND, expert_Nk, arrays)
        # The sum over the k experts is accumulated in float32.
        y_ND = jnp.einsum('NkD,Nk->ND', y_NkD, weight_Nk.astype(x_ND.dtype), preferred_element_type=jnp.float32)
        y_ND = y_ND.astype(x_ND.dtype)
        if partitioning.num_shards('expert_ffn') > 1:
            y_ND = jax.lax.psum(y_ND, partitioning.mesh_axes('expert_ffn'))
        return y_ND.reshape(x_BTD.shape), num_dropped

    def _dropless(self, x_ND: jax.Array, expert_Nk: jax.Array, arrays: dict[str, Arrays]) -> jax.Array:
        """Returns the output of each selected expert, [N, k, D]."""
        E, num_devices = self.config.num_experts, self.partitioning.num_shards('experts')
        kind = self.config.expert_matmul
        if self.is_quantized and expert_Nk.size <= E:
            # Only the kernels of selected experts are dequantized.
            kind = 'loop'
        block = block_size(expert_Nk.size, E, kind)
        if num_devices == 1:
            dispatch = sort_by_expert(expert_Nk, E, block)
            rows_RD = self.experts.apply(arrays, to_rows(x_ND, dispatch), RowGroups(dispatch.sizes_E, block), kind)
            return from_rows(rows_RD, dispatch)
        (axis,) = self.partitioning.mesh_axes('experts')
        is_ragged = self.partitioning.platform != 'cpu'
        exchange = make_exchange(expert_Nk, E, block, axis=axis, num_devices=num_devices, is_ragged=is_ragged)
        groups = RowGroups(exchange.received.sizes_E, block)
        return send_back(self.experts.apply(arrays, send(x_ND, exchange), groups, kind), exchange)

    def _limited(
        self, x_ND: jax.Array, expert_Nk: jax.Array, arrays: dict[str, Arrays], *, num_sequences: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of each selected expert, 0 beyond its capacity, and the number of dropped selections.

        Each expert has the same number of rows, so devices exchange equal parts and the products are batched products.
        """
        E, num_devices = self.config.num_experts, self.partitioning.num_shards('experts')
        balanced = expert_Nk.size / (num_sequences * E)
        capacity = math.ceil(self.config.expert_capacity_factor * balanced)
        dispatch = limit_by_capacity(expert_Nk, E, num_sequences, capacity)
        x_ERD = to_rows(x_ND, dispatch).reshape(E, -1, x_ND.shape[-1])
        axes = self.partitioning.mesh_axes('experts')
        if num_devices > 1:
            x_ERD = jax.lax.all_to_all(x_ERD, axes[0], split_axis=0, concat_axis=1, tiled=True)
        groups = RowGroups(jnp.full(len(x_ERD), x_ERD.shape[1]), 1)
        y_RD = self.experts.apply(arrays, x_ERD.reshape(-1, x_ERD.shape[-1]), groups, 'equal')
        y_ERD = y_RD.reshape(x_ERD.shape)
        if num_devices > 1:
            y_ERD = jax.lax.all_to_all(y_ERD, axes[0], split_axis=1, concat_axis=0, tiled=True)
        num_dropped = ((dispatch.row_Nk == len(dispatch.assignment_R)) & (expert_Nk < E)).sum()
        return from_rows(y_ERD.reshape(-1, x_ND.shape[-1]), dispatch), num_dropped


def _arrays(pairs: Mapping[str, tuple[jax.Array, Axes]]) -> dict[str, jax.Array]:
    return {name: array for name, (array, _) in pairs.items()}


def _axes(pairs: Mapping[str, tuple[jax.Array, Axes]]) -> dict[str, Axes]:
    return {name: axes for name, (_, axes) in pairs.items()}
