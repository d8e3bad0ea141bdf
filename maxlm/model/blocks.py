"""The decoder's blocks: attention, feed-forward, norms and residual stream of a layer.

Shapes: B batch, T query length, S key length, D dim, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.config.user_function import load_function
from maxlm.errors import InputError
from maxlm.model.attention.attention import Attention
from maxlm.model.attention.latent import LatentAttention
from maxlm.model.attention.tree import TokenTree
from maxlm.model.experts.expert_linear import ExpertLinear
from maxlm.model.experts.mixture_of_experts import MixtureOfExperts
from maxlm.model.experts.router import RouterStats
from maxlm.model.layers.kv_cache import CacheIndices, LayerCache
from maxlm.model.layers.linear import Linear
from maxlm.model.layers.mlp import FeedForward
from maxlm.model.layers.norm import Norm
from maxlm.model.layers.rope import Rotary
from maxlm.model.layers.weight_only_quantization import weights_of
from maxlm.model.value_embedding import ValueEmbeddings, value_embedding
from maxlm.parallel.partitioning import Partitioning

# Names of the decoder's attributes with the blocks, which are part of the path of every parameter stacked over layers:
# all blocks, except the first blocks of a model with experts that are dense.
BLOCKS, DENSE_BLOCKS = 'blocks', 'dense_blocks'
# In the order of the layers.
STACKS = (DENSE_BLOCKS, BLOCKS)
ACTIVATION_AXES = ('batch', 'length', 'activation')


def is_stacked(path: str) -> bool:
    """Returns True if the parameter with this dotted path is stacked over layers."""
    return path.partition('.')[0] in STACKS


class Context(NamedTuple):
    """Arguments of a call that all blocks share; see `Attention`.

    Attributes:
        masks: attention mask [B, T, S] or None, by window of the layer.
        segments_BT: index of the document of each token, or None.
        tree: token trees of the rows, or None.
        cache_indices: slots of this call's keys and values in the cache, by window of the layer.
        rotary: angles of the positions; None without rotary embedding.
        local_rotary: angles for the layers with a sliding window.
        score_divisor: additional divisor of the attention scores, a float32 scalar; None: 1.
        tokens_BT: token ids, for value embeddings.
        values: value embeddings of the model, or of the layer in the context of a layer; None without them.
    """

    masks: dict[int, jax.Array | None]
    segments_BT: jax.Array | None
    tree: TokenTree | None
    cache_indices: dict[int, CacheIndices | None]
    rotary: Rotary | None
    local_rotary: Rotary | None
    score_divisor: jax.Array | None = None
    tokens_BT: jax.Array | None = None
    values: ValueEmbeddings | None = None

    def for_layer(
        self, kind: str, score_divisor: jax.Array | None = None, values: ValueEmbeddings | None = None
    ) -> Context:
        """Returns the context of a layer, whose kind is its letter in `model.attention_pattern`."""
        rotary = {'L': self.rotary, 'S': self.local_rotary, 'N': None}[kind]
        return self._replace(rotary=rotary, score_divisor=score_divisor, values=values)

    def added_values(self, x_BTD: jax.Array, num_heads: int, partitioning: Partitioning) -> jax.Array | None:
        """Returns `value_embedding` of a layer with the input `x_BTD` of attention; None if the layer has none."""
        if self.values is None:
            return None
        assert self.tokens_BT is not None, 'value embeddings need the token ids'
        return value_embedding(self.values, x_BTD, self.tokens_BT, num_heads, partitioning)


class Branch(NamedTuple):
    """Output of a branch that is still to be added to the residual stream.

    Attributes:
        x_BTD: the output.
        bias_D: bias that the output contains without a gradient; None if its gradient is complete.
    """

    x_BTD: jax.Array
    bias_D: jax.Array | None = None

    def added_to(self, stream_BTD: jax.Array) -> jax.Array:
        """Returns the sum with the stream. The bias then has its gradient."""
        return stream_BTD + (self.x_BTD if self.bias_D is None else _with_bias_gradient(self.x_BTD, self.bias_D))


@jax.custom_vjp
def _with_bias_gradient(x_BTD: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Returns an array, whose gradient also is that of a bias in each of its rows."""
    del bias_D
    return x_BTD


def _bias_gradient(_: None, of_x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    return of_x_BTD, of_x_BTD.astype(jnp.float32).sum((0, 1))


_with_bias_gradient.defvjp(lambda x_BTD, bias_D: (x_BTD, None), _bias_gradient)


class Block(nnx.Module):
    """Residual block of attention and feed-forward, which run in parallel with `model.parallel_residual`.

    `model.norm_placement` selects norms of the input of each branch, of its output, or both. With `model.num_experts`,
    the feed-forward is a `MixtureOfExperts`.
    """

    def __init__(self, config: ModelConfig, *, partitioning: Partitioning, rngs: nnx.Rngs):
        pre, post = config.norm_placement != 'post', config.norm_placement != 'pre'

        def norm() -> Norm:
            return Norm(config, config.dim, rngs=rngs, partitioning=partitioning)

        self.attention_norm = norm() if pre else None
        make_attention = LatentAttention if config.kv_lora_rank else Attention
        self.attention = make_attention(config, partitioning=partitioning, rngs=rngs)
        self.attention_post_norm = norm() if post else None
        self.feedforward_norm = norm() if pre else None
        make_feedforward = MixtureOfExperts if config.num_experts else FeedForward
        self.feedforward = make_feedforward(config, partitioning=partitioning, rngs=rngs)
        self.feedforward_post_norm = norm() if post else None
        self.parallel_residual = config.parallel_residual
        self.has_norm_kernels = config.norm_kernel == 'pallas'
        self.residual_multiplier = config.residual_multiplier
        self.num_kv_heads = config.num_kv_heads
        self.dropout = config.dropout
        self.partitioning = partitioning
        # If the branch reaches the kernel of the next norm unchanged, the kernel sums the gradient of the bias. XLA
        # reads the gradient of the branch once more.
        is_unchanged = config.norm_placement == 'pre' and config.residual_multiplier == 1 and not config.dropout
        is_unchanged &= self.has_norm_kernels and not (config.parallel_residual or config.block)
        self.attention.out.is_bias_constant = is_unchanged
        if isinstance(self.feedforward, FeedForward):
            self.feedforward.down.is_bias_constant = is_unchanged and defers_additions(config)
        weights = weights_of(config)
        if weights is not None:
            for _, module in list(nnx.iter_modules(self)):
                if isinstance(module, (Linear, ExpertLinear)):
                    module.quantize_kernel(weights)
                if isinstance(module, Linear):
                    module.rounds_inputs = config.activation_quantization == 'int8'

    def __call__(
        self, x_BTD: jax.Array, context: Context, window: int, cache: LayerCache | None, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LayerCache | None, RouterStats | None]:
        """Returns the stream [B, T, D], the updated cache, and the statistics of the router of a layer with experts.

        `window` is the number of last tokens to which a query attends; 0 means all.
        """
        stream_BTD, branch, new_cache, router = self.run(x_BTD, None, context, window, cache, dropout_key)
        return self.partitioning.constrain(branch.added_to(stream_BTD), ACTIVATION_AXES), new_cache, router

    def run(
        self,
        stream_BTD: jax.Array,
        branch: Branch | None,
        context: Context,
        window: int,
        cache: LayerCache | None,
        dropout_key: jax.Array | None,
    ) -> tuple[jax.Array, Branch, LayerCache | None, RouterStats | None]:
        """Runs the block without its last addition, which the kernel of the next norm can perform.

        Args:
            stream_BTD: stream of the previous block.
            branch: branch that the previous block has not added to it; None if it has.
            context, window, cache, dropout_key: see `__call__`.

        Returns:
            The stream and the branch that is to be added to it, the updated cache, and the statistics of the router.
        """
        attention_key, feedforward_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x_BTD, normed_BTD = _add_and_normalize(self.attention_norm, stream_BTD, branch)
        with jax.named_scope('attention'):
            attended_BTD, new_cache = self.attention(
                normed_BTD,
                mask_BTS=context.masks[window],
                segments_BT=context.segments_BT,
                tree=context.tree,
                cache_indices=context.cache_indices[window],
                rotary=context.rotary,
                score_divisor=context.score_divisor,
                added_v_BTKH=context.added_values(normed_BTD, self.num_kv_heads, self.partitioning),
                window=window,
                cache=cache,
            )
        attended_BTD = self._branch(attended_BTD, self.attention_post_norm, attention_key)
        added = None if self.parallel_residual else Branch(attended_BTD, _constant_bias(self.attention.out))
        stream_BTD, fed_BTD = _add_and_normalize(self.feedforward_norm, x_BTD, added)
        bias_D, router = None, None
        if isinstance(self.feedforward, MixtureOfExperts):
            # With a cache, the capacity of experts would depend on the number of tokens in a call.
            fed_BTD, router = self.feedforward(fed_BTD, context.segments_BT, is_dropless=cache is not None)
        else:
            fed_BTD, bias_D = self.feedforward(fed_BTD), _constant_bias(self.feedforward.down)
        fed_BTD = self._branch(fed_BTD, self.feedforward_post_norm, feedforward_key)
        if self.parallel_residual and self.has_norm_kernels:
            # The sum of both branches needs no copy of the stream.
            fed_BTD = attended_BTD + fed_BTD
        elif self.parallel_residual:
            stream_BTD = stream_BTD + attended_BTD
        return stream_BTD, Branch(fed_BTD, bias_D), new_cache, router

    def _branch(self, x_BTD: jax.Array, norm: Norm | None, dropout_key: jax.Array | None) -> jax.Array:
        """Returns what a branch with the output `x_BTD` adds to the stream."""
        x_BTD = x_BTD if norm is None else norm(x_BTD)
        x_BTD = x_BTD if self.residual_multiplier == 1 else x_BTD * self.residual_multiplier
        return dropout(x_BTD, self.dropout, dropout_key)


def _constant_bias(linear: Linear) -> jax.Array | None:
    """Returns the bias of a projection that gives it no gradient; otherwise None."""
    return linear.bias[...] if linear.is_bias_constant and linear.bias is not None else None


def _add_and_normalize(norm: Norm | None, stream_BTD: jax.Array, branch: Branch | None) -> tuple[jax.Array, jax.Array]:
    """Returns the sum and the normalized sum; without a norm, the sum twice. See `Norm.add_and_normalize`."""
    if norm is not None:
        return norm.add_and_normalize(stream_BTD, *(branch or (None, None)))
    stream_BTD = stream_BTD if branch is None else branch.added_to(stream_BTD)
    return stream_BTD, stream_BTD


def defers_additions(config: ModelConfig) -> bool:
    """Returns True if the first norm of a block adds the last branch of the block before it to the stream.

    Loops and rematerialization would save the branch in addition to the stream. Options of the stream need it complete.
    """
    is_kept = not config.scan_layers and config.remat_policy == 'none'
    needs_stream = config.residual_scale or config.embedding_residual or config.backout_layer >= 0
    return (
        config.norm_kernel == 'pallas'
        and config.norm_placement != 'post'
        and is_kept
        and not (config.block or needs_stream)
    )


def block_class(config: ModelConfig) -> type[Block]:
    """Returns the class of the blocks: `Block`, or the class that `model.block` names.

    Raises:
        InputError: the class cannot be imported, does not accept the arguments of `Block`, or is not a subclass of it.
    """
    if not config.block:
        return Block
    found: Any = load_function(
        config.block, kind='model.block', arguments=('config',), keywords=('partitioning', 'rngs')
    )
    if not (isinstance(found, type) and issubclass(found, Block)):
        raise InputError(f'model.block={config.block}: must be a subclass of maxlm.model.blocks.Block')
    return found


def stack_modules(make: Callable[[nnx.Rngs], nnx.Module], num: int, rngs: nnx.Rngs, axis: str) -> nnx.Module:
    """Returns one module for `num` modules; its parameters have a leading axis with the logical name `axis`."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), num)
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)

    def name_axis(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(axes=(axis, *variable.axes))

    state = jax.tree.map(name_axis, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graph, state)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Applies inverted dropout (Srivastava et al. 2014); returns x unchanged without a key or if the rate is 0."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)
