"""Training objectives: next-token cross-entropy, optionally with distillation, DPO, KTO, reward models, GRPO and PPO.

An objective is a function of parameters and a micro-batch. It returns sums, so each token has the same weight,
regardless of how the batch is split into micro-batches.

Shapes: A micro-batches, B batch, T length, D dim, S sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.config.user_function import load_function
from maxlm.model.decoder import Decoder
from maxlm.model.mtp import shift_left
from maxlm.parallel.partitioning import Partitioning
from maxlm.training.batch import OLD_VALUES, PROXIMAL, RETURNS, SCORED, TEACHER_TYPES, Batch
from maxlm.training.forward import make_forward, make_log_probs, make_scores
from maxlm.training.losses.cross_entropy import cross_entropy
from maxlm.training.losses.distillation import StoredOutputs, TeacherOutputs, distillation
from maxlm.training.losses.dpo import PreferenceTerms, preference_terms
from maxlm.training.losses.grpo import Values, policy_sums
from maxlm.training.losses.kto import answer_terms
from maxlm.training.losses.log_probs import TokenLoss, token_losses
from maxlm.training.losses.reward import RewardTerms, score_terms
from maxlm.training.losses.router import ROUTER_PARTS, router_terms
from maxlm.training.state import Params


class LossSums(NamedTuple):
    """Sums over a batch.

    Attributes:
        loss: the reported loss, in nats; next-token loss excludes the z-loss.
        weight: denominator of the mean loss: number of predicted tokens, pairs or answers, or sum of token weights.
        tokens: number of predicted tokens.
        source_loss: [S] loss of the rows of each source; [0] if the batch has no `sources`.
        source_tokens: [S] predicted tokens of each source; [0] if the batch has no `sources`.
        parts: sums of the additional metrics, by metric name; see `aux_names`.
        part_counts: denominator of the mean of each of `parts`.
        load_LE: number of tokens that selected each expert, by layer with experts; None without experts and with
            objectives other than the next token.
        largest: metrics that are no sums but the largest values; None with objectives other than GRPO.
    """

    loss: jax.Array
    weight: jax.Array
    tokens: jax.Array
    source_loss: jax.Array
    source_tokens: jax.Array
    parts: dict[str, jax.Array]
    part_counts: dict[str, jax.Array]
    load_LE: jax.Array | None = None
    largest: dict[str, jax.Array] | None = None


# (params, reference, slots, batch, dropout key) → the minimized sum and the `LossSums`. Only the first has a gradient.
# `slots` receive the gradients of parameters in host memory; see `maxlm.parallel.host_offload.fetch`.
Objective = Callable[[Params, Params | None, Params | None, Batch, jax.Array | None], tuple[jax.Array, LossSums]]


def make_objective(config: Config, partitioning: Partitioning, num_sources: int = 0) -> Objective:
    """Returns the objective of a resolved config."""
    if config.train.objective == 'dpo':
        return _make_preference(config, partitioning)
    if config.train.objective == 'reward':
        return _make_reward(config, partitioning)
    if config.train.objective == 'grpo':
        return _make_policy(config, partitioning)
    return make_next_token(config, partitioning, num_sources, z_loss=config.train.z_loss)


def aux_names(config: Config) -> tuple[str, ...]:
    """Returns the names of the objective's additional metrics, which are the keys of `LossSums.parts`."""
    if config.train.objective == 'dpo':
        return tuple(labeled_parts(config) if config.dpo.takes_labels else DPO_PARTS)
    if config.train.objective == 'reward':
        return tuple(REWARD_PARTS)
    if config.train.objective == 'grpo':
        off_policy = OFF_POLICY_PARTS if config.grpo.max_staleness else ()
        of_values = VALUE_PARTS if config.model.value_head else ()
        return (*GRPO_PARTS, *off_policy, *(('kl',) if config.grpo.has_kl_loss else ()), *of_values)
    router = tuple(ROUTER_PARTS) if config.model.num_experts else ()
    distilled = ('distill_kl',) if config.teacher is not None or config.distill.logits_dir else ()
    return (*(('z_loss',) if config.train.z_loss else ()), *distilled, *mtp_names(config), *router)


def largest_names(config: Config) -> tuple[str, ...]:
    """Returns the names of the metrics that are largest values, which are the keys of `LossSums.largest`."""
    return (LOGPROB_DIFFERENCE,) if config.train.objective == 'grpo' else ()


def mtp_names(config: Config) -> tuple[str, ...]:
    """Returns the names of the metrics of multi-token prediction: one loss for each module."""
    depth = config.model.mtp_depth if config.train.mtp_loss_weight else 0
    return ('mtp_loss',) if depth == 1 else tuple(f'mtp_loss/{number}' for number in range(1, depth + 1))


# Name of the metric → field of `PreferenceTerms`.
DPO_PARTS = {
    'rewards/accuracies': 'accuracy',
    'rewards/margins': 'margin',
    'rewards/chosen': 'chosen_reward',
    'rewards/rejected': 'rejected_reward',
    'logps/chosen': 'chosen_log_prob',
    'logps/rejected': 'rejected_log_prob',
}
# Name of the metric → fields of `AnswerTerms`: the sum and its denominator.
LABELED_PARTS = {
    'rewards/accuracies': ('accuracy', 'answers'),
    'rewards/chosen': ('chosen_reward', 'desirable'),
    'rewards/rejected': ('rejected_reward', 'undesirable'),
    'logps/chosen': ('chosen_log_prob', 'desirable'),
    'logps/rejected': ('rejected_log_prob', 'undesirable'),
}
# Name of the metric → field of `RewardTerms`.
REWARD_PARTS = {
    'rewards/accuracies': 'accuracy',
    'rewards/margins': 'margin',
    'rewards/chosen': 'chosen_score',
    'rewards/rejected': 'rejected_score',
    'rewards/mean': 'mean_score',
}
GRPO_PARTS = ('clip_fraction', 'entropy', 'approx_kl')
LOGPROB_DIFFERENCE = 'logprob_difference'
OFF_POLICY_PARTS = ('importance_weight', 'importance_truncated_fraction')
VALUE_PARTS = ('value_loss', 'value_clip_fraction')


def labeled_parts(config: Config) -> dict[str, tuple[str, str]]:
    """Returns the parts of the losses of answers with labels, in the form of `LABELED_PARTS`."""
    point = {'reference_point': ('reference_point', 'answers')} if config.has_reference_point else {}
    return {**LABELED_PARTS, **point}


def zero_sums(config: Config, num_sources: int = 0) -> LossSums:
    """Returns sums of zero, with which accumulation starts."""
    parts = {name: jnp.zeros(()) for name in aux_names(config)}
    zero, by_source = jnp.zeros(()), jnp.zeros(num_sources)
    model, load_LE = config.model, None
    if model.num_experts and config.train.objective == 'next_token':
        load_LE = jnp.zeros((model.num_layers - model.num_dense_layers, model.num_experts))
    largest = dict.fromkeys(largest_names(config), zero) or None
    return LossSums(zero, zero, zero, by_source, by_source, parts, parts, load_LE, largest)


def add_sums(first: LossSums, second: LossSums) -> LossSums:
    """Returns the sums over two batches."""
    added: LossSums = jax.tree.map(jnp.add, first, second)
    return added._replace(largest=jax.tree.map(jnp.maximum, first.largest, second.largest))


def make_next_token(
    config: Config, partitioning: Partitioning, num_sources: int = 0, *, z_loss: float = 0.0
) -> Objective:
    """Returns the objective Σ cross-entropy of the predicted tokens + z_loss · Σ log² Z; see `cross_entropy`.

    With `train.loss`, it is the sum of that loss. With a teacher, it is that of `distillation`. Multi-token prediction
    adds train.mtp_loss_weight / depth times the sum of the cross-entropies of its modules, and a model with experts the
    losses of its routers.

    Raises:
        InputError: the function of `train.loss` cannot be imported.
    """
    user_loss: TokenLoss | None = None
    if config.train.loss:
        user_loss = load_function(config.train.loss, kind='train.loss', arguments=('logits', 'targets'))
    hidden = make_forward(config, partitioning)
    teacher = None if config.teacher is None else make_forward(config.of_teacher, partitioning)
    pipelined = config.accumulation // config.rounds

    def next_token(
        params: Params, reference: Params | None, slots: Params | None, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LossSums]:
        assert (reference is None) == (teacher is None), 'the reference is the teacher'
        hidden_BTD, model, router = hidden(params, slots, batch, dropout_key)
        targets_BT, weights_BT = (
            partitioning.constrain(batch[name], ('rows', 'length')) for name in ('targets', 'weights')
        )
        layout: Any = {
            'partitioning': partitioning,
            'chunk': config.train.loss_chunk_tokens,
            'logit_softcap': config.model.logit_softcap,
            # Each group has the rows of one micro-batch; the pipeline stages share them.
            'row_groups': max(1, pipelined // partitioning.num_shards('layers')),
        }
        kernel_DV = model.output_kernel()
        parts = {}
        outputs: TeacherOutputs | StoredOutputs | None = None
        if teacher is not None:
            teacher_BTD, taught, _ = teacher(reference, None, batch, None)
            outputs = TeacherOutputs(teacher_BTD, taught.output_kernel(), taught.config.logit_softcap)
        elif config.distill.logits_dir:
            outputs = StoredOutputs(
                *(partitioning.constrain(batch[name], ('rows', 'length')) for name in TEACHER_TYPES)
            )
        if outputs is not None:
            objective, loss_B, log_z_squared_B, divergence_B = distillation(
                hidden_BTD, kernel_DV, outputs, targets_BT, weights_BT, distill=config.distill, z_loss=z_loss, **layout
            )
            parts['distill_kl'] = divergence_B.sum()
        elif user_loss is None:
            objective, loss_B, log_z_squared_B = cross_entropy(
                hidden_BTD,
                kernel_DV,
                targets_BT,
                weights_BT,
                z_loss=z_loss,
                is_tied=config.model.tie_embeddings,
                is_fp8=config.model.fp8_head,
                **layout,
            )
        else:
            losses_BT = token_losses(hidden_BTD, kernel_DV, targets_BT, user_loss, **layout)
            loss_B = (weights_BT * losses_BT).sum(axis=1)
            objective = loss_B.sum()
        tokens_B = batch['weights'].sum(axis=1)
        source_loss = source_tokens = jnp.zeros(0)
        if num_sources:
            is_from_BS = batch['sources'][:, None] == jnp.arange(num_sources)[None, :]
            # A selection instead of a product, so that a non-finite row affects only its own source.
            source_loss, source_tokens = (
                jnp.where(is_from_BS, rows[:, None], 0).sum(axis=0) for rows in (loss_B, tokens_B)
            )
        tokens = tokens_B.sum()
        if z_loss:
            parts['z_loss'] = z_loss * log_z_squared_B.sum()
        if names := mtp_names(config):
            losses = _mtp_losses(model, hidden_BTD, batch, dropout_key, config, layout)
            objective += config.train.mtp_loss_weight / len(losses) * sum(losses)
            parts |= {name: jax.lax.stop_gradient(loss) for name, loss in zip(names, losses, strict=True)}
        load_LE = None
        if router is not None:
            router_loss, router_parts = router_terms(router, batch['weights'], config.train)
            objective, parts, load_LE = objective + router_loss, {**parts, **router_parts}, router.load_E.sum(axis=0)
        counts = dict.fromkeys(parts, tokens)
        return objective, LossSums(loss_B.sum(), tokens, tokens, source_loss, source_tokens, parts, counts, load_LE)

    return next_token


def _mtp_losses(
    model: Decoder,
    hidden_BTD: jax.Array,
    batch: Batch,
    dropout_key: jax.Array | None,
    config: Config,
    layout: dict[str, Any],
) -> list[jax.Array]:
    """Returns Σ cross-entropy of each module of multi-token prediction. Targets are in the document of their query."""
    segments_BT = batch['segments']
    hidden_states = model.mtp_hidden(
        hidden_BTD,
        batch['tokens'],
        segments_BT=segments_BT if config.data.document_mask else None,
        positions_BT=batch['positions'],
        # The model splits the key in two, which gives the same keys as folding in 0 and 1.
        dropout_key=None if dropout_key is None else jax.random.fold_in(dropout_key, 2),
    )
    losses = []
    for depth, states_BTD in enumerate(hidden_states, start=1):
        # Modules do not learn the first token of the next document. The document of a row's last target is unknown.
        after_BT = shift_left(segments_BT, depth + 1)
        is_same_BT = (shift_left(segments_BT, depth) == segments_BT) & ((after_BT == segments_BT) | (after_BT == 0))
        weights_BT = jnp.where(is_same_BT, shift_left(batch['weights'], depth), 0)
        found = cross_entropy(
            states_BTD, model.output_kernel(), shift_left(batch['targets'], depth), weights_BT, **layout
        )
        losses.append(found.objective)
    return losses


def _make_preference(config: Config, partitioning: Partitioning) -> Objective:
    """Returns the objective of preferences: of pairs, see `preference_terms`, or of answers with labels.

    For answers with labels, see `answer_terms`. KTO needs `reference_point` in the batch.
    """
    log_probs = make_log_probs(config, partitioning)

    def preference(
        params: Params, reference: Params | None, slots: Params | None, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LossSums]:
        found = log_probs(params, slots, batch, dropout_key).log_probs_BT
        reference_BT = None
        if config.has_reference:
            reference_BT = jax.lax.stop_gradient(log_probs(reference, None, batch, None).log_probs_BT)
        make_sums = _labeled_sums if config.dpo.takes_labels else _pair_sums
        return make_sums(config, found, reference_BT, batch)

    return preference


def _pair_sums(
    config: Config, found_BT: jax.Array, reference_BT: jax.Array | None, batch: Batch
) -> tuple[jax.Array, LossSums]:
    terms = preference_terms(found_BT, reference_BT, batch['weights'], batch['segments'], config.dpo)
    return _sums_of_pairs(terms, DPO_PARTS, batch)


def _sums_of_pairs(
    terms: PreferenceTerms | RewardTerms, fields: Mapping[str, str], batch: Batch
) -> tuple[jax.Array, LossSums]:
    """Returns the sums over pairs. `fields` has the field of `terms` of each metric."""
    parts = {name: jax.lax.stop_gradient(getattr(terms, field)) for name, field in fields.items()}
    loss, tokens, none = jax.lax.stop_gradient(terms.objective), batch['weights'].sum(), jnp.zeros(0)
    counts = dict.fromkeys(parts, terms.pairs)
    return terms.objective, LossSums(loss, terms.pairs, tokens, none, none, parts, counts)


def _labeled_sums(
    config: Config, found_BT: jax.Array, reference_BT: jax.Array | None, batch: Batch
) -> tuple[jax.Array, LossSums]:
    assert reference_BT is not None, 'losses of answers with labels have a reference'
    point_B = batch['reference_point'] if config.has_reference_point else None
    terms = answer_terms(found_BT, reference_BT, batch['weights'], batch['segments'], point_B, config.dpo)
    parts, counts = (
        {name: getattr(terms, fields[place]) for name, fields in labeled_parts(config).items()} for place in (0, 1)
    )
    loss, tokens, none = jax.lax.stop_gradient(terms.objective), batch['weights'].sum(), jnp.zeros(0)
    return terms.objective, LossSums(loss, terms.answers, tokens, none, none, parts, counts)


def _make_reward(config: Config, partitioning: Partitioning) -> Objective:
    """Returns the objective of a reward model of pairs of answers; see `score_terms`."""
    scores = make_scores(config, partitioning)

    def reward(
        params: Params, reference: Params | None, slots: Params | None, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LossSums]:
        del reference
        scores_BT = scores(params, slots, batch, dropout_key)
        terms = score_terms(scores_BT, batch[SCORED], batch['segments'], config.reward_model)
        return _sums_of_pairs(terms, REWARD_PARTS, batch)

    return reward


def _make_policy(config: Config, partitioning: Partitioning) -> Objective:
    """Returns the GRPO objective; see `policy_sums`."""
    log_probs = make_log_probs(config, partitioning)

    def policy(
        params: Params, reference: Params | None, slots: Params | None, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[jax.Array, LossSums]:
        found = log_probs(params, slots, batch, dropout_key)
        reference_BT = None
        if config.grpo.has_kl_loss:
            reference_BT = jax.lax.stop_gradient(log_probs(reference, None, batch, None).log_probs_BT)
        values = None
        if found.values_BT is not None:
            values = Values(found.values_BT, batch[OLD_VALUES], batch[RETURNS])
        sums = policy_sums(
            found.log_probs_BT,
            found.entropies_BT,
            reference_BT,
            old_log_probs_BT=batch['old_log_probs'],
            advantages_BT=batch['advantages'],
            predicted_BT=batch['predicted'],
            weights_BT=batch['weights'],
            config=config.grpo,
            proximal_BT=batch[PROXIMAL] if config.has_proximal else None,
            values=values,
        )
        weight = batch['weights'].sum()
        if config.grpo.loss_type == 'dr_grpo':
            weight = (batch['weights'].max(axis=1) * config.grpo.max_completion_length).sum()
        parts = {'clip_fraction': sums.clipped, 'entropy': sums.entropy, 'approx_kl': sums.old_kl}
        if config.grpo.max_staleness:
            parts |= dict(zip(OFF_POLICY_PARTS, (sums.importance, sums.truncated), strict=True))
        if config.grpo.has_kl_loss:
            parts['kl'] = sums.reference_kl
        if values is not None:
            parts |= dict(zip(VALUE_PARTS, (sums.value_loss, sums.value_clipped), strict=True))
        loss = jax.lax.stop_gradient(sums.objective)
        none, counts = jnp.zeros(0), dict.fromkeys(parts, sums.tokens)
        largest = {LOGPROB_DIFFERENCE: sums.largest_difference}
        return sums.objective, LossSums(loss, weight, sums.tokens, none, none, parts, counts, largest=largest)

    return policy
