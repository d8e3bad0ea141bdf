"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

The keys and values of all heads are projections of one latent per token. Each key also has a part with rotary
positions, which is the same for all heads. The cache stores only the latent and this part. A call with a cache computes
attention in absorbed form: because q·(W c) = (Wᵀ q)·c, the projections of keys and values are applied to queries and
outputs instead of the latents.

Shapes: B batch, T query length, S key length, D dim, N heads, C kv_lora_rank, Q q_lora_rank, P head dim without rotary
positions, R head dim with rotary positions, H = P + R, V value head dim.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.attention.decode import attend_cached
from maxlm.model.attention.kernels import AttentionInputs, choose_attention_kernel, chunked
from maxlm.model.attention.tree import TokenTree, tree_attention
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.kv_cache import CacheIndices, LayerCache
from maxlm.model.layers.linear import Initializer, Linear, fused_apply
from maxlm.model.layers.lora import adapter_of
from maxlm.model.layers.norm import Norm
from maxlm.model.layers.rope import Rotary, rotate, score_factor
from maxlm.parallel.partitioning import Partitioning

# Epsilon of the norms of the latents in all implementations of DeepSeek's models, whatever that of the other norms is.
LATENT_NORM_EPSILON = 1e-6


class LatentAttention(nnx.Module):
    """Self-attention module with keys and values computed from a latent; a replacement for `Attention`."""

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        D, N, C, Q = config.dim, config.num_heads, config.kv_lora_rank, config.q_lora_rank
        P, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        init = initializers(config)

        def linear(
            name: str,
            in_shape: tuple[int, ...],
            out_shape: tuple[int, ...],
            in_axes: tuple[str, ...],
            out_axes: tuple[str, ...],
            init: Initializer = init.projection,
        ) -> Linear:
            return Linear(
                in_shape,
                out_shape,
                in_axes=in_axes,
                out_axes=out_axes,
                init=init,
                use_bias=False,
                matmul=config.matmul_precision,
                partitioning=partitioning,
                rngs=rngs,
                adapter=adapter_of(config, f'attention.{name}'),
            )

        wide, heads = ('embed',), ('heads', 'head_dim')
        latent_config = dataclasses.replace(config, norm_epsilon=LATENT_NORM_EPSILON)
        self.query_latent = linear('query_latent', (D,), (Q,), wide, ('latent',)) if Q else None
        self.query_latent_norm = Norm(latent_config, Q, rngs=rngs) if Q else None
        # Latents are sharded as the model width to save memory: the axis `embed` of their projections.
        self.query = linear('query', (Q or D,), (N, P + R), wide, heads)
        # The latent of keys and values, and the rotated part of the keys.
        self.key_value_latent = linear('key_value_latent', (D,), (C + R,), wide, ('latent',))
        self.key_value_latent_norm = Norm(latent_config, C, rngs=rngs)
        self.key = linear('key', (C,), (N, P), wide, heads)
        self.value = linear('value', (C,), (N, V), wide, heads)
        self.out = linear('out', (N, V), (D,), heads, wide, init.residual)
        self.nope_dim, self.latent_dim = P, C
        self.score_factor = score_factor(config)
        self.kernel = choose_attention_kernel(config, partitioning)
        self.partitioning = partitioning

    @property
    def fused_projections(self) -> tuple[str, ...]:
        """Names of the projections of the same input."""
        return ('query' if self.query_latent is None else 'query_latent', 'key_value_latent')

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
        """Returns the attention output [B, T, D] and the updated cache. Arguments: see `Attention`."""
        assert rotary is not None, 'latent attention has rotary positions'
        assert score_divisor is None, 'only GPT-2 scales the scores of each layer'
        assert added_v_BTKH is None, 'latent attention has no value embeddings'
        if self.query_latent is not None and self.query_latent_norm is not None:
            latent_BTQ, latent_BTc = fused_apply((self.query_latent, self.key_value_latent), x_BTD)
            q_BTNH = self.query(self.query_latent_norm(latent_BTQ))
        else:
            q_BTNH, latent_BTc = fused_apply((self.query, self.key_value_latent), x_BTD)
        latent_BTC = self.key_value_latent_norm(latent_BTc[..., : self.latent_dim])
        rotated_BT1R = rotate(latent_BTc[..., None, self.latent_dim :], rotary)
        if self.score_factor != 1:
            q_BTNH = q_BTNH * self.score_factor
        q_BTNP, q_BTNR = q_BTNH[..., : self.nope_dim], rotate(q_BTNH[..., self.nope_dim :], rotary)
        if cache is None:
            q_BTNH = jnp.concatenate([q_BTNP, q_BTNR], axis=-1)
            o_BTNV = self._attend(q_BTNH, latent_BTC, rotated_BT1R, mask_BTS, segments_BT, tree, window)
            return self.out(o_BTNV), None
        assert cache_indices is not None, 'a call with a cache needs the indices of its slots'
        assert mask_BTS is not None, 'a call with a cache needs a mask over its slots'
        assert self.partitioning.num_shards('length') == 1, 'a cache does not support a sharded length'
        cache = cache.write(cache_indices, latent_BTC[:, :, None], rotated_BT1R)
        q_BTNC = jnp.einsum('BTNP,CNP->BTNC', q_BTNP, self.key.effective_kernel(x_BTD.dtype))
        q_BTNc = self._of_heads(jnp.concatenate([q_BTNC, q_BTNR], axis=-1))
        scale = 1 / math.sqrt(q_BTNH.shape[-1])
        o_BTNC = attend_cached(q_BTNc, cache, cache_indices, mask_BTS, scale=scale, is_latent=True)
        o_BTNV = jnp.einsum('BTNC,CNV->BTNV', o_BTNC, self.value.effective_kernel(x_BTD.dtype))
        return self.out(self._of_heads(o_BTNV)), cache

    def _attend(
        self,
        q_BTNH: jax.Array,
        latent_BTC: jax.Array,
        rotated_BT1R: jax.Array,
        mask_BTS: jax.Array | None,
        segments_BT: jax.Array | None,
        tree: TokenTree | None,
        window: int,
    ) -> jax.Array:
        """Returns the output [B, T, N, V] of attention within the call, with keys and values of each head."""
        k_BTNP, v_BTNV = fused_apply((self.key, self.value), latent_BTC)
        k_BTNR = jnp.broadcast_to(rotated_BT1R, (*k_BTNP.shape[:-1], rotated_BT1R.shape[-1]))
        k_BTNH = jnp.concatenate([k_BTNP, k_BTNR], axis=-1)
        q_BSNH, k_BSNH, v_BSNV = map(self._of_heads, (q_BTNH, k_BTNH, v_BTNV))
        if tree is not None:
            assert self.partitioning.num_shards('length') == 1, 'tree attention does not support a sharded length'
            return tree_attention(q_BSNH, k_BSNH, v_BSNV, tree, window=window)
        width = v_BSNV.shape[-1]
        if self.kernel is not chunked:
            # Other kernels require values as wide as keys.
            v_BSNV = jnp.pad(v_BSNV, [(0, 0), (0, 0), (0, 0), (0, k_BSNH.shape[-1] - width)])
        inputs = AttentionInputs(q_BSNH, k_BSNH, v_BSNV, mask_BTS, segments_BT)
        o_BTNV: jax.Array = self.kernel(inputs, window, self.partitioning)[..., :width]
        return o_BTNV

    def _of_heads(self, x_BTNH: jax.Array) -> jax.Array:
        return self.partitioning.constrain(x_BTNH, ('batch', 'length', 'heads', 'head_dim'))
