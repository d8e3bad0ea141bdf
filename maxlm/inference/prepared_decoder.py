"""A model with a key-value cache whose parameters are converted once, before they are used many times.

Shapes: P prompts per call, T tokens of a chunk, D dim, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.config.schema import Config
from maxlm.model.blocks import BLOCKS, STACKS
from maxlm.model.layers.kv_cache import Caches
from maxlm.model.prepared_kernels import convert, prepare_modules, uses_unstacked_layers
from maxlm.model.smear import previous_ids
from maxlm.parallel.layout import Layout
from maxlm.runtime.cpu_kernels import register_cpu_kernels
from maxlm.training.state import Params, abstract_model


class PreparedDecoder:
    """The graph of a model, and the form of parameters in which few rows per pass are fast.

    Attributes:
        are_layers_unstacked: True if layers have separate arrays, see `uses_unstacked_layers`.
    """

    def __init__(self, config: Config, layout: Layout):
        """Initializes the graph.

        Args:
            config: resolved config.
            layout: layout of the parameters.
        """
        self._platform = layout.platform
        self.are_layers_unstacked = uses_unstacked_layers(config, layout)
        # A copy, because the cached abstract model must not be modified.
        decoder = nnx.merge(*nnx.split(abstract_model(config, layout)))
        packs = config.model.activation_quantization == 'int8' and register_cpu_kernels()
        self._form = prepare_modules(decoder, packs=packs) if self.are_layers_unstacked else None
        self._graph, abstract = nnx.split(decoder)
        self._abstract_blocks = {name: tree for name, tree in nnx.to_pure_dict(abstract).items() if name in STACKS}

    def prepare(self, params: Params) -> Params:
        """Converts parameters to the form that `build` takes."""
        if self._form is None:
            return params
        others = convert({name: tree for name, tree in params.items() if name not in STACKS}, self._form)
        stacks = {name: params[name] for name in STACKS if name in params}
        if self._platform != 'cpu' or len(devices := jax.tree.leaves(stacks)[0].devices()) > 1:
            # One program for all parameters compiles faster than one program per shape.
            return {**others, BLOCKS: jax.jit(lambda stacks: list(self._unstack(stacks)))(stacks)}
        # NumPy copies the layers on a CPU without a program. Views would keep the stacks in memory.
        (device,) = devices

        def place(x: np.ndarray) -> jax.Array:
            return jax.device_put(np.array(x, order='C'), device)

        layers = self._unstack(jax.tree.map(np.asarray, stacks))
        return {**others, BLOCKS: [jax.tree.map(place, layer) for layer in layers]}

    def build(self, params: Params) -> tuple[Any, Any]:
        """Returns the model, and the parameters of its blocks if they are unstacked."""
        if not self.are_layers_unstacked:
            return nnx.merge(self._graph, params), None
        return nnx.merge(self._graph, {**params, **self._abstract_blocks}), params[BLOCKS]

    def prefill(
        self, params: Params, caches: Caches, tokens_PT: jax.Array, placement: jax.Array, length_P: jax.Array
    ) -> tuple[Any, jax.Array, Caches]:
        """Runs chunks of prompts in one pass, and returns the model, hidden states [P, T, D] and caches.

        Args:
            params: parameters in the form of `prepare`.
            caches: caches of all slots.
            tokens_PT: tokens of each chunk.
            placement: slot, position of the first token, number of tokens and token before (or NO_TOKEN) of each
                chunk, int32 [4, P].
            length_P: number of positions of each slot after this call; tokens at later positions are not written.
        """
        slot_P, start_P, _, before_P = placement
        decoder, blocks = self.build(params)
        run = partial(
            decoder,
            tokens_PT,
            positions_BT=start_P[:, None] + jnp.arange(tokens_PT.shape[1])[None, :],
            previous_BT=previous_ids(tokens_PT, before_P),
            length_B=length_P,
            blocks=blocks,
        )
        if len(tokens_PT) == 1:
            hidden_PTD, caches, _ = run(cache=caches, first_row=slot_P[0])
            return decoder, hidden_PTD, caches
        # The slots are not contiguous, so their caches are gathered and scattered.
        hidden_PTD, new_caches, _ = run(cache=jax.tree.map(lambda x: x[:, slot_P], caches))
        caches = jax.tree.map(lambda x, new: x.at[:, slot_P].set(new, mode='drop'), caches, new_caches)
        return decoder, hidden_PTD, caches

    def _unstack(self, stacks: Params) -> Iterator[Params]:
        """Yields the parameters of each layer, in the order of the layers."""
        assert self._form is not None, 'stacked layers are used as they are'
        for name in STACKS:
            for layer in range(len(jax.tree.leaves(stacks[name])[0]) if name in stacks else 0):
                block = jax.tree.map(lambda x_L, layer=layer: x_L[layer], stacks[name])
                yield convert(block, self._form, (name,))
