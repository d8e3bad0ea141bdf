"""Causal self-attention with grouped key/value heads, sliding windows, an optional cache, and the choice of kernel.

Shapes: B batch, T query length, S key length, D dim, N query heads, K key/value heads, G = N/K, H head dim,
X blocks of queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.attention.chunked import attend_blockwise
from maxlm.model.attention.cudnn import attend_documents, supports_documents
from maxlm.model.attention.decode import attend_cached, attend_slots
from maxlm.model.attention.ring import ring_attention
from maxlm.model.attention.splash import attend_splash, supports_length
from maxlm.model.attention.tree import TokenTree, tree_attention
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.kv_cache import CacheIndices, LayerCache, Slots
from maxlm.model.layers.linear import Linear, fused_apply
from maxlm.model.layers.lora import adapter_of
from maxlm.model.layers.norm import Norm
from maxlm.model.layers.rope import Rotary, rotate
from maxlm.parallel.partitioning import Axes, Partitioning


class Attention(nnx.Module):
    """Projections around `attend`."""

    def __init__(self, config: ModelConfig, *, placement: Partitioning, rngs: nnx.Rngs):
        D, N, K, H = config.dim, config.num_heads, config.num_kv_heads, config.head_dim
        use_bias = bool(config.use_bias)
        init = initializers(config)

        def into_heads(name: str, heads: int, axis: str) -> Linear:
            return Linear(
                (D,),
                (heads, H),
                in_axes=('embed',),
                out_axes=(axis, 'head_dim'),
                init=init.projection,
                use_bias=use_bias,
                matmul=config.matmul_precision,
                placement=placement,
                rngs=rngs,
                adapter=adapter_of(config, f'attention.{name}'),
            )

        self.query = into_heads('query', N, 'heads')
        self.key = into_heads('key', K, 'kv_heads')
        self.value = into_heads('value', K, 'kv_heads')
        self.out = Linear(
            (N, H),
            (D,),
            in_axes=('heads', 'head_dim'),
            out_axes=('embed',),
            init=init.residual,
            use_bias=use_bias,
            matmul=config.matmul_precision,
            placement=placement,
            rngs=rngs,
            adapter=adapter_of(config, 'attention.out'),
        )
        # One scale for all heads (Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters").
        self.query_norm = Norm(config, H, rngs=rngs) if config.qk_norm else None
        self.key_norm = Norm(config, H, rngs=rngs) if config.qk_norm else None
        self.kernel = config.attention
        self.placement = placement

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        mask_BTS: jax.Array | None,
        segments_BT: jax.Array | None,
        forest: TokenTree | None,
        places: CacheIndices | None,
        rotary: Rotary | None,
        window: int,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Returns the attention output [B, T, D] and the cache with this call's keys and values.

        `mask_BTS` is True where a query may look; None means causal attention over the T tokens of the call, of which
        a query sees the last `window` (0: all). With a cache, `places` is where this call's keys and values go, S the
        number of slots, and the mask must allow filled ones only. Where the length is split over devices, it is in
        zigzag, and `segments_BT` takes the mask's place. In rows that hold trees `forest` does.
        """
        q_BTNH, k_BTKH, v_BTKH = fused_apply((self.query, self.key, self.value), x_BTD)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH, k_BTKH = self.query_norm(q_BTNH), self.key_norm(k_BTKH)
        if rotary is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rotary), rotate(k_BTKH, rotary)
        q_BTNH = self.placement.constrain(q_BTNH, ('batch', 'length', 'heads', 'head_dim'))
        k_BSKH = self.placement.constrain(k_BTKH, ('batch', 'length', 'kv_heads', 'head_dim'))
        v_BSKH = self.placement.constrain(v_BTKH, ('batch', 'length', 'kv_heads', 'head_dim'))
        if forest is not None:
            assert self.placement.num_shards('length') == 1, 'a tree is not split over devices'
            return self.out(tree_attention(q_BTNH, k_BSKH, v_BSKH, forest, window=window)), None
        if self.placement.num_shards('length') > 1:
            assert cache is None, 'a sequence that is split over devices has no cache'
            return self.out(self._attend_in_ring(q_BTNH, k_BSKH, v_BSKH, segments_BT, window)), None
        if cache is not None:
            # Slots are looked at by position, for which the fused kernels have no mask of their own.
            assert places is not None, 'a cached call has places'
            assert mask_BTS is not None, 'a cached call has a mask'
            cache = cache.write(places, k_BSKH, v_BSKH)
            return self.out(attend_cached(q_BTNH, cache, places, mask_BTS)), cache
        kernel = self.kernel
        if kernel == 'splash' and supports_length(q_BTNH.shape[1]):
            o_BTNH = attend_splash(q_BTNH, k_BSKH, v_BSKH, segments_BT, window=window, placement=self.placement)
            return self.out(o_BTNH), None
        if kernel in ('xla', 'splash'):
            return self.out(attend_blockwise(q_BTNH, k_BSKH, v_BSKH, segments_BT, window=window)), None
        if kernel == 'cudnn' and segments_BT is not None and supports_documents(q_BTNH, self.placement):
            o_BTNH = attend_documents(q_BTNH, k_BSKH, v_BSKH, segments_BT, window=window, placement=self.placement)
            return self.out(o_BTNH), None
        # JAX's rule for a vmap over the fused kernel, which a pipeline is, takes a mask for every head only.
        mask_heads = q_BTNH.shape[2] if self.placement.num_shards('layers') > 1 else 1
        o_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, mask_BTS, window=window, kernel=kernel, mask_heads=mask_heads)
        return self.out(o_BTNH), None

    def _attend_in_ring(
        self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array | None, window: int
    ) -> jax.Array:
        def attend_shard(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> jax.Array:
            *segments, mesh_axis = rest
            return ring_attention(q, k, v, segments[0] if segments else None, axis=mesh_axis, window=window)

        rows = ('batch', 'length')
        heads, kv_heads = (*rows, 'heads', 'head_dim'), (*rows, 'kv_heads', 'head_dim')
        arrays: list[jax.Array] = [q_BTNH, k_BTKH, v_BTKH]
        axes: list[Axes] = [heads, kv_heads, kv_heads]
        if segments_BT is not None:
            arrays, axes = [*arrays, segments_BT], [*axes, rows]
        return self.placement.per_shard(attend_shard, axes, heads, 'length')(*arrays)


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array | None,
    *,
    window: int,
    kernel: str,
    mask_heads: int = 1,
) -> jax.Array:
    """softmax(q·k / sqrt(H)) · v, by the kernel asked for.

    Args:
        q_BTNH: queries; k_BSKH, v_BSKH: keys and values, K dividing N.
        mask_BTS: True where a query may look; None: causal, T = S.
        window: where `mask_BTS` is None, the number of last tokens that a query sees, its own included; 0: all.
        kernel: `xla` or `cudnn`, as `model.attention` was resolved.
        mask_heads: 1, or N if cudnn is to be given the mask once for each head.

    Returns:
        [B, T, N, H] in q's type.
    """
    if kernel == 'cudnn':
        mask = None
        if mask_BTS is not None:
            B, T, S = mask_BTS.shape
            mask = jnp.broadcast_to(mask_BTS[:, None], (B, mask_heads, T, S))
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask=mask,
            is_causal=mask_BTS is None,
            local_window_size=(window - 1, 0) if window and mask_BTS is None else None,
            implementation='cudnn',
        )
    if mask_BTS is None:
        return attend_blockwise(q_BTNH, k_BSKH, v_BSKH, None, window=window)
    return attend_slots(q_BTNH, Slots(k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2), None, None), mask_BTS)
