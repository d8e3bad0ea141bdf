"""Forward pass of the model for the objectives: hidden states, log-probabilities of targets, and scores of answers.

Shapes: B batch, T length, D dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from maxlm.config.schema import Config
from maxlm.model.blocks import BLOCKS
from maxlm.model.decoder import Decoder
from maxlm.model.experts.router import RouterStats
from maxlm.parallel.host_offload import fetch, on_host
from maxlm.parallel.partitioning import Partitioning
from maxlm.training.batch import Batch
from maxlm.training.fp8_history import has_fp8_inputs
from maxlm.training.losses.log_probs import TokenLogProbs, token_log_probs
from maxlm.training.state import Params, abstract_fp8_model, abstract_model


def make_forward(
    config: Config, partitioning: Partitioning
) -> Callable[[Params, Params | None, Batch, jax.Array | None], tuple[jax.Array, Decoder, RouterStats | None]]:
    """Returns a function (params, slots, batch, dropout key) → hidden states, model and statistics of the routers.

    The last hidden states are sharded for the loss.
    """
    graph, _ = nnx.split(abstract_model(config, partitioning))
    is_delayed = config.model.fp8_scaling == 'delayed'
    scaled_graph = nnx.split(abstract_fp8_model(config, partitioning)[0])[0] if is_delayed else None
    pipelined = config.accumulation // config.rounds

    def forward(
        params: Params, slots: Params | None, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, Decoder, RouterStats | None]:
        blocks_slots = None
        assert slots is None or any(map(on_host, jax.tree.leaves(params))), 'slots stand in for parameters on the host'
        if any(map(on_host, jax.tree.leaves(params))):
            # The model fetches the blocks one layer at a time.
            blocks_slots = None if slots is None else slots[BLOCKS]
            rest = {name: fetch(tree, slots and slots[name]) for name, tree in params.items() if name != BLOCKS}
            params = {**rest, BLOCKS: params[BLOCKS]}
        model: Decoder = nnx.merge(
            scaled_graph if scaled_graph is not None and has_fp8_inputs(params) else graph, params
        )
        hidden_BTD, _, router = model(
            batch['tokens'],
            segments_BT=batch['segments'] if config.data.document_mask else None,
            positions_BT=batch['positions'],
            dropout_key=dropout_key,
            micro_batches=pipelined,
            slots=blocks_slots,
        )
        return partitioning.constrain(hidden_BTD, ('rows', 'length', 'activation')), model, router

    return forward


def make_log_probs(
    config: Config, partitioning: Partitioning
) -> Callable[[Params, Params | None, Batch, jax.Array | None], TokenLogProbs]:
    """Returns a function (params, slots, batch, dropout key) → log-probabilities of the batch's targets, and values."""
    hidden = make_forward(config, partitioning)
    pipelined = config.accumulation // config.rounds

    def log_probs(params: Params, slots: Params | None, batch: Batch, dropout_key: jax.Array | None) -> TokenLogProbs:
        hidden_BTD, model, _ = hidden(params, slots, batch, dropout_key)
        found = token_log_probs(
            hidden_BTD,
            model.output_kernel(),
            partitioning.constrain(batch['targets'], ('rows', 'length')),
            partitioning=partitioning,
            chunk=config.train.loss_chunk_tokens,
            logit_softcap=config.model.logit_softcap,
            row_groups=max(1, pipelined // partitioning.num_shards('layers')),
            has_entropy_gradient=config.train.objective == 'grpo' and config.grpo.entropy_coef > 0,
        )
        if config.model.value_head:
            found = found._replace(values_BT=model.scores(hidden_BTD))
        placed: TokenLogProbs = jax.tree.map(lambda x: partitioning.constrain(x, ('batch', 'length')), found)
        return placed

    return log_probs


def make_scores(
    config: Config, partitioning: Partitioning
) -> Callable[[Params, Params | None, Batch, jax.Array | None], jax.Array]:
    """Returns a function (params, slots, batch, dropout key) → scores of a reward model, float32 [B, T]."""
    hidden = make_forward(config, partitioning)

    def scores(params: Params, slots: Params | None, batch: Batch, dropout_key: jax.Array | None) -> jax.Array:
        hidden_BTD, model, _ = hidden(params, slots, batch, dropout_key)
        return partitioning.constrain(model.scores(hidden_BTD), ('rows', 'length'))

    return scores
