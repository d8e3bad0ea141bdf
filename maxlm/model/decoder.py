"""The decoder: embedding, blocks in a loop, final norm and logits. Every model family is a configuration of it.

Shapes: B batch, T query length, S key length, D dim, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.model.attention.tree import TokenTree
from maxlm.model.blocks import ACTIVATION_AXES, Context, block_class, dropout, stack_modules
from maxlm.model.experts.router import RouterStats
from maxlm.model.layer_loop import run_layers, run_layers_unrolled
from maxlm.model.layers.embedding import look_up
from maxlm.model.layers.initializers import initializers
from maxlm.model.layers.kv_cache import Cache, CacheIndices, Caches, cache_indices_and_mask, slots_by_window
from maxlm.model.layers.linear import Linear, parameter, transposed_matmul
from maxlm.model.layers.masks import document_mask, layer_kinds, layer_windows
from maxlm.model.layers.norm import Norm
from maxlm.model.layers.rope import rotary_angles
from maxlm.model.layers.rounded_inputs import PackedHead
from maxlm.model.layers.softcap import softcap
from maxlm.model.mtp import MtpModule, run_mtp
from maxlm.model.pipeline import run_pipeline
from maxlm.model.smear import PreviousTokens, smear
from maxlm.model.stream import Stream, first_stream, make_parameters, without_backout
from maxlm.model.value_embedding import looked_up, value_layers, value_parameters, values_of
from maxlm.parallel.partitioning import SINGLE_DEVICE, Axes, Partitioning


class Decoder(nnx.Module):
    """Decoder-only transformer, which maps token ids to hidden states and hidden states to logits."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, partitioning: Partitioning = SINGLE_DEVICE):
        """Creates the parameters.

        Args:
            config: resolved config of the model.
            rngs: random keys of the initializers.
            partitioning: partitioning over the device mesh.
        """
        init = initializers(config)
        D, V = config.dim, config.vocab_size
        self.embedding = parameter(rngs, (V, D), ('vocab', 'embed'), init.embedding)
        learned, positions = config.position_embedding == 'learned', (config.max_positions, D)
        self.position_embedding = parameter(rngs, positions, ('position', 'embed'), init.position) if learned else None
        self.embedding_norm = Norm(config, D, rngs=rngs) if config.embedding_norm else None
        make_block, num_dense = block_class(config), config.num_dense_layers
        dense = dataclasses.replace(config, num_experts=0)
        # Layers of a stack have equal parameters. Every stage of a pipeline has the first dense layers.

        def stacked(config: ModelConfig, num: int, axis: str) -> nnx.Module:
            return stack_modules(lambda rngs: make_block(config, partitioning=partitioning, rngs=rngs), num, rngs, axis)

        self.dense_blocks = stacked(dense, num_dense, 'dense_layers') if num_dense else None
        self.blocks = stacked(config, config.num_layers - num_dense, 'layers')
        self.final_norm = Norm(config, config.dim, rngs=rngs, partitioning=partitioning)

        def make_head(outputs: int, axis: str, initializer: nnx.Initializer = init.head) -> Linear:
            return Linear(
                (D,),
                (outputs,),
                in_axes=('embed',),
                out_axes=(axis,),
                init=initializer,
                use_bias=False,
                matmul='default',
                partitioning=partitioning,
                rngs=rngs,
            )

        # Also created for tied embeddings, so that the other parameters have the same initial values.
        untied = make_head(V, 'vocab')
        self.head = None if config.tie_embeddings or config.reward_head else untied

        def make_mtp(rngs: nnx.Rngs) -> MtpModule:
            return MtpModule(config, partitioning=partitioning, rngs=rngs)

        self.mtp = stack_modules(make_mtp, config.mtp_depth, rngs, 'layers') if config.mtp_depth else None
        # Last, so that the other parameters have the same initial values without these options.
        self.value_embeddings, self.value_gates = value_parameters(config, rngs)
        of_stream = make_parameters(config, rngs)
        self.residual_scales, self.embedding_scales = of_stream.residual_scales, of_stream.embedding_scales
        self.smear_gate, self.smear_scale = of_stream.smear_gate, of_stream.smear_scale
        self.backout_scale = of_stream.backout_scale
        self.score = make_head(1, 'activation') if config.reward_head else None
        # Zero, so that the first advantages do not depend on random values (Ziegler et al. 2019).
        self.value_head = make_head(1, 'activation', nnx.initializers.zeros) if config.value_head else None
        # True if the kernel of the logits is stored transposed, as [V, D].
        self.is_transposed = False
        self.packed_head: PackedHead | None = None
        self.config = config
        self.partitioning = partitioning

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        ends_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
        previous_BT: jax.Array | None = None,
        cache: Caches | None = None,
        first_row: jax.Array | int = 0,
        length_B: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        micro_batches: int = 1,
        slots: Any = None,
        blocks: Sequence[Any] | None = None,
    ) -> tuple[jax.Array, Caches | None, RouterStats | None]:
        """Returns the hidden states [B, T, D] from which `logits` follow, the caches, and statistics of the routers.

        The arrays of the statistics are stacked to [micro_batches, layers with experts, …]. Without experts, and if
        `blocks` is given, there are none.

        Args:
            tokens_BT: token ids.
            segments_BT: number of each token's document. Tokens attend only to their own document. None: each row is
                one document.
            ends_BT: replaces `segments_BT` for rows of token trees (`maxlm.model.attention.tree`): index after the last
                token that attends to this one. It does not support gradients, caches, pipelines or a sharded length.
            positions_BT: position of each token in its document; None: 0, 1, 2, …
            previous_BT: id of the token before each token, or `maxlm.model.smear.NO_TOKEN`. A model with
                `model.smear_channels` requires it together with `ends_BT` or `cache`. None: the previous of the row, if
                it is of the same document.
            cache: keys and values of earlier calls. Queries then attend to the positions up to their own, and
                `segments_BT` must be None.
            first_row: row of the cache that corresponds to row 0 of the call.
            length_B: length of each row including these tokens. Later positions are padding, which is not written to
                the cache; see also `rotary_angles`. None: no padding.
            dropout_key: random key of dropout; None disables dropout.
            micro_batches: number M of micro-batches of a pipeline. Row r is in micro-batch r mod M.
            slots: arrays that receive the gradients of the blocks' parameters in host memory; see
                `maxlm.parallel.host_offload.fetch`.
            blocks: parameters of each block in place of the model's own, together with one cache per block.
        """
        config = self.config
        B, T = tokens_BT.shape
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        x_BTD = self._embed(tokens_BT, positions_BT)
        if self.smear_gate is not None and self.smear_scale is not None:
            is_complete = cache is None and ends_BT is None
            assert is_complete or previous_BT is not None, 'calls with a cache or trees pass the previous tokens'
            find = PreviousTokens(tokens_BT, positions_BT, segments_BT, previous_BT, self._embed, self.partitioning)
            x_BTD = smear(x_BTD, find, self.smear_gate[...], self.smear_scale[...])
        embed_key, blocks_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x_BTD = dropout(self.partitioning.constrain(x_BTD, ACTIVATION_AXES), config.dropout, embed_key)

        stream = first_stream(config, x_BTD, self.residual_scales, self.embedding_scales)
        keys_L = None if blocks_key is None else jax.random.split(blocks_key, (micro_batches, config.num_layers))
        if self.partitioning.num_shards('layers') > 1:
            assert cache is None, 'a pipeline has no cache'
            assert ends_BT is None, 'a pipeline has no trees'
            stream, router = self._run_pipeline(stream, tokens_BT, segments_BT, positions_BT, keys_L, micro_batches)
        else:
            assert micro_batches == 1, 'without stages micro-batches come one at a time'
            context = self._context(segments_BT, positions_BT, cache, first_row, length_B)
            values = values_of(self.value_embeddings, self.value_gates)
            if values is not None and cache is not None:
                values = looked_up(values, tokens_BT, self.partitioning)
            context = context._replace(tokens_BT=tokens_BT, values=values)
            if ends_BT is not None:
                assert cache is None, 'rows of trees have no cache'
                context = context._replace(tree=TokenTree(ends_BT, positions_BT))
            graph, blocks_L = nnx.split(self.blocks)
            kinds, num_dense = layer_kinds(config), config.num_dense_layers
            if blocks is not None:
                assert isinstance(cache, list), 'parameters of each layer go with a cache for each'
                graphs = [graph] * len(kinds)
                if self.dense_blocks is not None:
                    graphs[:num_dense] = [nnx.split(self.dense_blocks)[0]] * num_dense
                stream, cache = run_layers_unrolled(graphs, config, stream, context, blocks, cache)
                router = None
            else:
                assert not isinstance(cache, list), 'a cache for each layer goes with parameters of each'
                keys = None if keys_L is None else keys_L[0]
                stream, cache = self._run_dense_layers(stream, context, keys, cache)
                inputs_L = (nnx.to_pure_dict(blocks_L), slots, None if keys is None else keys[num_dense:])
                windows = layer_windows(config)
                firsts = {window: windows[:num_dense].count(window) for window in windows}
                stream, cache, router = run_layers(
                    graph,
                    config,
                    self.partitioning,
                    kinds[num_dense:],
                    stream,
                    context,
                    inputs_L,
                    cache,
                    firsts,
                    num_dense,
                )
                router = jax.tree.map(lambda leaf: leaf[None], router)
        hidden_BTD = self.final_norm(without_backout(stream, self.backout_scale))
        is_scaled = config.logits_scaling != 1 and self.score is None
        return hidden_BTD / config.logits_scaling if is_scaled else hidden_BTD, cache, router

    def mtp_hidden(
        self,
        hidden_BTD: jax.Array,
        tokens_BT: jax.Array,
        *,
        segments_BT: jax.Array | None,
        positions_BT: jax.Array,
        dropout_key: jax.Array | None,
    ) -> list[jax.Array]:
        """Returns the hidden states [B, T, D] of each module of multi-token prediction; see `run_mtp`.

        Args:
            hidden_BTD: hidden states that `__call__` returned.
            tokens_BT, segments_BT, positions_BT, dropout_key: see `__call__`.
        """
        context = self._context(segments_BT, positions_BT, None, 0, None)
        table_VD = self._used(self.embedding[...].astype(hidden_BTD.dtype), ('vocab', 'embed'))
        results = run_mtp(
            self.mtp, self.config, self.partitioning, hidden_BTD, tokens_BT, table_VD, context, dropout_key=dropout_key
        )
        scaling = self.config.logits_scaling
        return results if scaling == 1 else [result / scaling for result in results]

    def output_kernel(self) -> jax.Array:
        """Returns the kernel of the logits, [D, V] in float32, sharded as its parameter."""
        assert not self.is_transposed, 'transposed kernels are for `logits`'
        kernel: jax.Array = self.embedding[...].T if self.head is None else self.head.kernel[...]
        return kernel

    def scores(self, hidden_BTD: jax.Array) -> jax.Array:
        """Returns the scores of a reward model, or the outputs of a value head, at each token, [B, T] in float32."""
        head = self.value_head if self.score is None else self.score
        assert head is not None, 'only a model with model.reward_head or model.value_head has scores'
        kernel_D = self.partitioning.gathered(head.kernel[...], ('embed', 'activation'))[:, 0]
        return jnp.einsum('BTD,D->BT', hidden_BTD.astype(jnp.float32), kernel_D, precision=jax.lax.Precision.HIGHEST)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Returns the logits of the next token, [B, T, V] in float32."""
        dtype = hidden_BTD.dtype
        if self.packed_head is not None:
            logits_BTV = self.packed_head(hidden_BTD)
        elif self.is_transposed:
            table = self.embedding if self.head is None else self.head.kernel
            table_VD = self._used(table[...].astype(dtype), ('vocab', 'embed'))
            rows_MD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
            logits_MV = transposed_matmul(rows_MD, table_VD, jnp.float32, platform=self.partitioning.platform)
            logits_BTV = logits_MV.reshape(*hidden_BTD.shape[:-1], -1)
        else:
            kernel_DV = self._used(self.output_kernel().astype(dtype), ('embed', 'vocab'))
            logits_BTV = jnp.dot(hidden_BTD, kernel_DV, preferred_element_type=jnp.float32)
        logits_BTV = softcap(logits_BTV, self.config.logit_softcap)
        logits_BTV = self.partitioning.constrain(logits_BTV, ('rows', 'length', 'vocab'))
        if logits_BTV.shape[-1] == self.config.vocab_size:
            return logits_BTV
        # The unpadded vocabulary does not divide over the devices, so it is replicated.
        return self.partitioning.constrain(logits_BTV, ('rows', 'length', 'activation'))[..., : self.config.vocab_size]

    def _embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Returns the embeddings [B, T, D] of tokens at positions."""
        config = self.config
        table_VD = self._used(self.embedding[...].astype(config.dtype), ('vocab', 'embed'))
        x_BTD = look_up(table_VD, tokens_BT, ('vocab', 'embed'), self.partitioning)
        if config.embedding_multiplier != 1:
            x_BTD = x_BTD * config.embedding_multiplier
        if self.position_embedding is not None:
            table = self.position_embedding[...].astype(config.dtype)
            table = self.partitioning.gathered(table, ('position', 'embed'))
            x_BTD = x_BTD + look_up(table, positions_BT, ('position', 'embed'), self.partitioning)
        return x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)

    def _used(self, table: jax.Array, axes: Axes) -> jax.Array:
        """Returns a vocabulary table for products and lookups, padded and gathered."""
        return self.partitioning.gathered(self.partitioning.pad_vocabulary(table, axes), axes)

    def _context(
        self,
        segments_BT: jax.Array | None,
        positions_BT: jax.Array,
        caches: Caches | None,
        first_row: jax.Array | int,
        length_B: jax.Array | None,
    ) -> Context:
        config, windows = self.config, set(layer_windows(self.config))
        masks: dict[int, jax.Array | None] = dict.fromkeys(windows)
        cache_indices: dict[int, CacheIndices | None] = dict.fromkeys(windows)
        if caches is not None:
            assert segments_BT is None, 'a cached call has one document per row'
            for window, num_slots in slots_by_window(caches, config).items():
                cache_indices[window], masks[window] = cache_indices_and_mask(
                    num_slots, positions_BT, length_B, window=window, first_row=first_row
                )
        # In ring attention each device computes the masks of the keys that it receives.
        elif self.partitioning.num_shards('length') == 1:
            T = positions_BT.shape[1]
            masks = {window: document_mask(T, segments_BT, window) for window in windows}
        rotary = local_rotary = None
        if config.position_embedding == 'rotary':
            rotary = local_rotary = rotary_angles(positions_BT, config, length_B)
            if config.rope_local_theta and any(windows):
                local = dataclasses.replace(config, rope_theta=config.rope_local_theta, rope_scaling='none')
                local_rotary = rotary_angles(positions_BT, local, length_B)
        return Context(masks, segments_BT, None, cache_indices, rotary, local_rotary)

    def _run_dense_layers(
        self, stream: Stream, context: Context, keys_L: jax.Array | None, cache: dict[int, Cache] | None
    ) -> tuple[Stream, dict[int, Cache] | None]:
        """Runs the first dense layers of a model with experts. `keys_L` has the dropout keys of all layers."""
        num = self.config.num_dense_layers
        if self.dense_blocks is None:
            return stream, cache
        graph, blocks_L = nnx.split(self.dense_blocks)
        inputs_L = (nnx.to_pure_dict(blocks_L), None, None if keys_L is None else keys_L[:num])
        kinds = layer_kinds(self.config)[:num]
        return run_layers(graph, self.config, self.partitioning, kinds, stream, context, inputs_L, cache)[:2]

    def _run_pipeline(
        self,
        stream: Stream,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None,
        positions_BT: jax.Array,
        keys_ML: jax.Array | None,
        micro_batches: int,
    ) -> tuple[Stream, RouterStats | None]:
        """Runs the blocks as a pipeline. Row r is in micro-batch r mod M, so no row moves to another device."""
        config, stages, repeats = self.config, self.partitioning.num_shards('layers'), self.partitioning.repeats
        graph, blocks_L = nnx.split(self.blocks)
        num_dense = config.num_dense_layers
        layers = (config.num_layers - num_dense) // (stages * repeats)
        kinds = layer_kinds(config)[num_dense : num_dense + layers]

        def split(x_B: jax.Array) -> jax.Array:
            axes = ('micro_batch', 'batch', 'length', 'activation')[: x_B.ndim + 1]
            x_MB = x_B.reshape(-1, micro_batches, *x_B.shape[1:]).swapaxes(0, 1)
            return self.partitioning.constrain(x_MB, axes)

        def run(params: Any, packed: jax.Array, side: Any, first_layer: jax.Array) -> tuple[jax.Array, Any]:
            (blocks, variables), (tokens_BT, segments_BT, positions_BT, keys_L) = params, side
            keys = None if keys_L is None else jax.lax.dynamic_slice_in_dim(keys_L, num_dense + first_layer, layers)
            context = self._context(segments_BT, positions_BT, None, 0, None)
            context = context._replace(tokens_BT=tokens_BT, values=values_of(*variables))
            inputs_L = (blocks, None, keys)
            result, _, router = run_layers(
                graph,
                config,
                self.partitioning,
                kinds,
                stream.unpacked(packed),
                context,
                inputs_L,
                first_layer=num_dense + first_layer,
            )
            return result.packed(), router

        def run_dense(inputs: Any) -> jax.Array:
            packed, (tokens_BT, segments_BT, positions_BT, keys_L) = inputs
            context = self._context(segments_BT, positions_BT, None, 0, None)
            values = values_of(self.value_embeddings, self.value_gates)
            context = context._replace(tokens_BT=tokens_BT, values=values)
            return self._run_dense_layers(stream.unpacked(packed), context, keys_L, None)[0].packed()

        def place(variable: nnx.Variable) -> nnx.Variable:
            axes = ('repeats', 'stage', 'layers_of_stage', *variable.axes[1:])
            return variable.replace(self.partitioning.constrain(variable[...], axes))

        of_dense = sum(value_layers(config)[:num_dense])
        variables = jax.tree.map(lambda stack: stack[of_dense:], (self.value_embeddings, self.value_gates))
        of_tokens = (tokens_BT if self.value_embeddings is not None else None, segments_BT, positions_BT)
        side_M = (*(None if x is None else split(x) for x in of_tokens), keys_ML)
        packed = stream.packed()
        x_MBTD = split(packed)
        if num_dense:
            x_MBTD = jax.lax.map(run_dense, (x_MBTD, side_M))
        y_MBTD, router = run_pipeline(
            run,
            (blocks_L, variables),
            x_MBTD,
            side_M,
            stages=stages,
            repeats=repeats,
            constrain=self.partitioning.constrain,
            place_params=lambda blocks: jax.tree.map(place, blocks, is_leaf=lambda x: isinstance(x, nnx.Variable)),
        )
        return stream.unpacked(y_MBTD.swapaxes(0, 1).reshape(packed.shape)), router


def without_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Masks the logits of vocabulary padding, from index `vocab_size`; their probability and gradient become 0."""
    if logits.shape[-1] == vocab_size:
        return logits
    is_token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < vocab_size
    # The value is finite, because an entropy multiplies it by its probability of 0.
    return jnp.where(is_token, logits, jnp.finfo(logits.dtype).min)
