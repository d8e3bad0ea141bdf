"""Causal self-attention with grouped-query attention (GQA), sliding windows and an optional KV cache.

Shapes: B batch, T query length, S key length, D dim, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.attention.decode import attend_cached
from maxlm.model.attention.kernels import AttentionInputs, choose_attention_kernel
from maxlm.model.attention.tree import TokenTree, tree_attention
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.kv_cache import CacheIndices, LayerCache
from maxlm.model.layers.linear import Linear, fused_apply, parameter
from maxlm.model.layers.lora import adapter_of
from maxlm.model.layers.norm import Norm
from maxlm.model.layers.rope import Rotary, rotate
from maxlm.parallel.partitioning import Partitioning


class Attention(nnx.Module):
    """Self-attention module: projections of queries, keys, values and output around an attention kernel."""

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        D, N, K, H = config.dim, config.num_heads, config.num_kv_heads, config.head_dim
        init = initializers(config)

        def into_heads(name: str, heads: int, axis: str) -> Linear:
            return Linear(
                (D,),
                (heads, H),
                in_axes=('embed',),
                out_axes=(axis, 'head_dim'),
                init=init.projection,
                use_bias=config.has_bias('qkv'),
                matmul=config.matmul_precision,
                partitioning=partitioning,
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
            use_bias=config.has_bias('out'),
            matmul=config.matmul_precision,
            partitioning=partitioning,
            rngs=rngs,
            adapter=adapter_of(config, 'attention.out'),
        )
        # One scale for all heads (Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters"), or a
        # norm over all heads (OLMo Team 2024, "2 OLMo 2 Furious").
        self.normalizes_heads = config.qk_norm_scope == 'head'
        query_dim, key_dim = (H, H) if self.normalizes_heads else (N * H, K * H)
        self.query_norm = Norm(config, query_dim, rngs=rngs) if config.qk_norm else None
        self.key_norm = Norm(config, key_dim, rngs=rngs) if config.qk_norm else None
        # Kernels divide scores by sqrt(H), so queries are multiplied by the ratio of the scales.
        absolute, relative = config.attention_multiplier, config.relative_attention_multiplier
        self.query_multiplier = absolute * math.sqrt(H) if absolute else relative
        self.softcap = config.attention_softcap
        # Queries attend to a sink like to a key with this logit and a value of 0.
        zeros = jax.nn.initializers.zeros
        self.sinks = parameter(rngs, (N,), ('heads',), zeros) if config.attention_sinks else None
        self.kernel = choose_attention_kernel(config, partitioning)
        self.partitioning = partitioning

    @property
    def fused_projections(self) -> tuple[str, ...]:
        """Names of the projections of the same input."""
        return ('query', 'key', 'value')

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        mask_BTS: jax.Array | None,
        segments_BT: jax.Array | None,
        tree: TokenTree | None,
        cache_indices: CacheIndices | None,
        rotary: Rotary | None,
        score_divisor: jax.Array | None,
        added_v_BTKH: jax.Array | None,
        window: int,
        cache: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Returns the attention output [B, T, D] and the cache with this call's keys and values.

        Args:
            x_BTD: activations. If the length is sharded, they are in zigzag order.
            mask_BTS: True where a query attends to a key; None: causal attention over the T tokens of the call. With a
                cache, S is its number of slots, and the mask must exclude empty ones.
            segments_BT: index of the document of each token, for kernels without a mask.
            tree: token trees of the rows; replaces mask and segments.
            cache_indices: slots of the cache to which this call's keys and values are written.
            rotary: rotations of the positions; None: no rotary embedding.
            score_divisor: additional divisor of the scores, a float32 scalar; None: 1.
            added_v_BTKH: array that is added to the values; None: 0.
            window: number of last tokens to which a query attends, including itself; 0: all.
            cache: keys and values of earlier calls; None: attention within the call.
        """
        q_BTNH, k_BTKH, v_BTKH = fused_apply((self.query, self.key, self.value), x_BTD)
        v_BTKH = v_BTKH if added_v_BTKH is None else v_BTKH + added_v_BTKH
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH, k_BTKH = self._normalized(self.query_norm, q_BTNH), self._normalized(self.key_norm, k_BTKH)
        if rotary is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rotary), rotate(k_BTKH, rotary)
        if self.query_multiplier != 1 or score_divisor is not None:
            divisor = 1.0 if score_divisor is None else score_divisor
            q_BTNH = (q_BTNH.astype(jnp.float32) * (self.query_multiplier / divisor)).astype(q_BTNH.dtype)
        q_BTNH = self.partitioning.constrain(q_BTNH, ('batch', 'length', 'heads', 'head_dim'))
        k_BSKH = self.partitioning.constrain(k_BTKH, ('batch', 'length', 'kv_heads', 'head_dim'))
        v_BSKH = self.partitioning.constrain(v_BTKH, ('batch', 'length', 'kv_heads', 'head_dim'))
        sinks_N = None if self.sinks is None else self.sinks[...]
        if tree is not None:
            assert self.partitioning.num_shards('length') == 1, 'tree attention does not support a sharded length'
            o_BTNH = tree_attention(q_BTNH, k_BSKH, v_BSKH, tree, window=window, softcap=self.softcap, sinks_N=sinks_N)
        elif cache is not None:
            assert cache_indices is not None, 'a call with a cache needs the indices of its slots'
            assert mask_BTS is not None, 'a call with a cache needs a mask over its slots'
            assert self.partitioning.num_shards('length') == 1, 'a cache does not support a sharded length'
            cache = cache.write(cache_indices, k_BSKH, v_BSKH)
            o_BTNH = attend_cached(q_BTNH, cache, cache_indices, mask_BTS, softcap=self.softcap, sinks_N=sinks_N)
        else:
            inputs = AttentionInputs(q_BTNH, k_BSKH, v_BSKH, mask_BTS, segments_BT, self.softcap, sinks_N)
            o_BTNH = self.kernel(inputs, window, self.partitioning)
        return self.out(o_BTNH), cache

    def _normalized(self, norm: Norm, x_BTNH: jax.Array) -> jax.Array:
        if self.normalizes_heads:
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)
