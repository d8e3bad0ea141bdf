"""Losses of preferences and rewards against TRL: values and gradients on the same batch.

The model is a table of logits of the next token for each token, so both libraries compute the same log-probabilities.
"""

import contextlib
import warnings
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from maxlm.config.sections.posttraining import DpoConfig, GrpoConfig
from maxlm.training.losses.dpo import preference_terms
from maxlm.training.losses.grpo import policy_sums, token_weights
from maxlm.training.losses.kto import answer_terms, mismatched_answers
from tests.answers import pack

with warnings.catch_warnings():
    # TRL warns that its ORPO may be removed.
    warnings.simplefilter('ignore')
    from trl.experimental.orpo import ORPOTrainer

VOCAB, LONGEST = 13, 7


def table(seed, scale=1.0):
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32) * np.float32(scale)


POLICY, REFERENCE = table(0), table(1)
OLD_POLICY = POLICY + table(2, 0.15)
# Policy that sampled the responses, if it differs from the policy before the first update.
SAMPLING_POLICY = OLD_POLICY + table(4, 0.15)
CAP = 1.05


class Bigram(torch.nn.Module):
    """Model with the outputs that TRL reads: logits, or with `fused_lm_head` the log-probabilities of the labels."""

    is_gradient_checkpointing = False

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))

    def forward(self, input_ids, labels=None, **_):
        if labels is None:
            return SimpleNamespace(logits=self.logits[input_ids])
        log_probs = self.logits.log_softmax(-1)[input_ids[:, :-1], input_ids[:, 1:]]
        log_probs = torch.where(labels[:, 1:] == -100, 0, log_probs)
        entropy = torch.distributions.Categorical(logits=self.logits).entropy()[input_ids[:, :-1]]
        none = torch.zeros_like(log_probs).detach()
        return SimpleNamespace(log_probs=log_probs, entropy=entropy, mean_logits=none, is_top1=none > 0)


def unchanged(x, **_):
    """Stands for the collectives of a single process."""
    return x


def make_trainer(kind, model, **settings):
    """Returns a trainer with the attributes that its loss reads, without data, optimizer and processes."""
    accelerator = SimpleNamespace(
        device='cpu',
        num_processes=1,
        is_main_process=False,
        gather=unchanged,
        gather_for_metrics=unchanged,
        reduce=unchanged,
        autocast=contextlib.nullcontext,
        sync_gradients=False,
    )
    args = SimpleNamespace(
        gradient_checkpointing_kwargs=None,
        use_bias_correction_kl=False,
        delta=None,
        steps_per_generation=1,
        report_to=[],
    )
    trainer = kind.__new__(kind)
    trainer.__dict__ |= {
        'model': model,
        'ref_model': Bigram(REFERENCE),
        'accelerator': accelerator,
        'args': args,
        'aux_loss_enabled': False,
        'precompute_ref_logps': False,
        '_metrics': defaultdict(lambda: defaultdict(list)),
        '_total_train_tokens': 0,
        '_tp_size': 1,
        **settings,
    }
    return trainer


def padded(sequences):
    """Returns input ids, attention mask and completion mask of (prompt, answer) sequences, each [B, T]."""
    length = max(len(prompt) + len(answer) for prompt, answer in sequences)
    rows = [([*p, *a], [1] * len(p + a), [0] * len(p) + [1] * len(a)) for p, a in sequences]
    return [torch.tensor([row[i] + [0] * (length - len(row[i])) for row in rows]) for i in range(3)]


def make_answers(count, seed, prompts=(1, 5)):
    rng = np.random.default_rng(seed)

    def tokens(low, high):
        return rng.integers(0, VOCAB, rng.integers(low, high)).tolist()

    return [(tokens(*prompts), tokens(1, LONGEST)) for _ in range(count)]


def make_pairs(count, seed=3, prompts=(1, 5)):
    found = make_answers(2 * count, seed, prompts)
    return [(chosen, (chosen[0], rejected[1])) for chosen, rejected in zip(found[::2], found[1::2], strict=True)]


def log_probs(logits, batch):
    return jax.nn.log_softmax(logits)[batch['tokens'], batch['targets']]


def check(ours, theirs):
    """Compares the value and the gradient of two losses, functions of the policy."""
    value, gradient = jax.jit(jax.value_and_grad(ours))(jnp.array(POLICY))
    model = Bigram(POLICY)
    loss = theirs(model)
    loss.backward()
    np.testing.assert_allclose(value, loss.item(), rtol=2e-6)
    np.testing.assert_allclose(gradient, model.logits.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert abs(value) > 1e-3
    assert np.abs(gradient).max() > 1e-3
    return float(value)


def preference_loss(pairs, dpo, policy):
    batch = pack([answer for pair in pairs for answer in pair])
    reference = None if dpo.loss_type == 'orpo' else log_probs(REFERENCE, batch)
    terms = preference_terms(log_probs(policy, batch), reference, batch['weights'], batch['segments'], dpo)
    return terms.objective / terms.pairs


def dpo_of_trl(pairs, settings, model):
    names = ('input_ids', 'attention_mask', 'completion_mask')
    batch = dict(zip(names, padded([pair[i] for i in (0, 1) for pair in pairs]), strict=True))
    settings = {'ld_alpha': None, 'f_divergence_type': 'reverse_kl', 'use_weighting': False, **settings}
    return make_trainer(DPOTrainer, model, **settings).compute_loss(model, batch)


def mean_of_pairs(loss, pairs, model):
    return sum(loss([pair], model=model) for pair in pairs) / len(pairs)


# TRL has label smoothing in the loss aot, which is that of DPO for a single pair. Its loss sft is the mean over the
# tokens of all answers, and that of maxlm the mean over the tokens of each answer.
PREFERENCES = {
    'sigmoid': (DpoConfig(beta=0.3), {'loss_types': ['sigmoid'], 'loss_weights': [1.0]}, False),
    'ipo': (DpoConfig(beta=0.4, loss_type='ipo'), {'loss_types': ['ipo'], 'loss_weights': [1.0]}, False),
    'smoothed': (DpoConfig(beta=0.3, label_smoothing=0.2), {'loss_types': ['aot'], 'loss_weights': [1.0]}, True),
    'next token': (
        DpoConfig(beta=0.3, rpo_alpha=0.7),
        {'loss_types': ['sigmoid', 'sft'], 'loss_weights': [1.0, 0.7]},
        True,
    ),
}


@pytest.mark.parametrize('name', PREFERENCES)
def test_preference_losses(name):
    dpo, settings, one_by_one = PREFERENCES[name]
    theirs = partial(dpo_of_trl, settings={'beta': dpo.beta, 'label_smoothing': dpo.label_smoothing, **settings})
    pairs = make_pairs(5)
    value = check(
        partial(preference_loss, pairs, dpo),
        partial(mean_of_pairs, theirs, pairs) if one_by_one else lambda model: theirs(pairs, model=model),
    )
    # Negative control: no other loss has this value.
    for other, (settings, *_) in PREFERENCES.items():
        if other != name:
            assert abs(float(preference_loss(pairs, settings, POLICY)) - value) > 1e-3


def orpo_of_trl(pairs, model):
    batch = {}
    for i, answer in enumerate(('chosen', 'rejected')):
        ids, attention, completion = padded([pair[i] for pair in pairs])
        batch |= {f'{answer}_input_ids': ids, f'{answer}_attention_mask': attention}
        batch |= {f'{answer}_labels': torch.where(completion == 1, ids, -100)}
    trainer = make_trainer(ORPOTrainer, model, beta=0.8, is_encoder_decoder=False, padding_value=0)
    return trainer.get_batch_loss_metrics(model, batch)[0]


def test_orpo():
    dpo = DpoConfig(beta=0.8, loss_type='orpo')
    # TRL's cross-entropy also covers the prompt, in which a single token has no target, and is a mean over all tokens.
    pairs = make_pairs(5, prompts=(1, 2))
    check(partial(preference_loss, pairs, dpo), partial(mean_of_pairs, orpo_of_trl, pairs))
    # Negative control: the prompt counts in TRL.
    pairs = make_pairs(5, prompts=(3, 5))
    with pytest.raises(AssertionError):
        check(partial(preference_loss, pairs, dpo), partial(mean_of_pairs, orpo_of_trl, pairs))


def kto_of_trl(answers, labels, dpo, model):
    shift = len(answers) // 2
    mismatched = [(prompt, answers[(k + shift) % len(answers)][1]) for k, (prompt, _) in enumerate(answers)]
    names = ('input_ids', 'attention_mask', 'completion_mask')
    batch = {'label': torch.tensor(labels), **dict(zip(names, padded(answers), strict=True))}
    batch |= dict(zip([f'KL_{name}' for name in names], padded(mismatched), strict=True))
    weights = {'desirable_weight': dpo.desirable_weight, 'undesirable_weight': dpo.undesirable_weight}
    settings = {'loss_type': dpo.loss_type, 'beta': dpo.beta, 'calculate_KL': dpo.loss_type == 'kto', **weights}
    trainer = make_trainer(KTOTrainer, model, **settings)
    loss = trainer.compute_loss(model, batch)
    return loss, trainer._metrics['train']['kl'][0]


def kto_loss(answers, labels, dpo, policy):
    batch = pack(
        [document for a, good in zip(answers, labels, strict=True) for document in ((a, None) if good else (None, a))]
    )
    point = None
    if dpo.loss_type == 'kto':
        permuted, count = mismatched_answers(batch)
        ratios = jnp.where(permuted['weights'] > 0, log_probs(policy, permuted) - log_probs(REFERENCE, permuted), 0)
        point = jax.lax.stop_gradient(jnp.maximum(ratios.sum() / count, 0))[None]
    terms = answer_terms(
        log_probs(policy, batch), log_probs(REFERENCE, batch), batch['weights'], batch['segments'], point, dpo
    )
    return terms.objective / terms.answers


@pytest.mark.parametrize('loss_type', ['kto', 'apo_zero_unpaired'])
@pytest.mark.parametrize(('seed', 'is_above_0'), [(6, True), (5, False)])
def test_losses_of_labeled_answers(loss_type, seed, is_above_0):
    answers, labels = make_answers(6, seed), [True, False, False, True, True, False]
    dpo = DpoConfig(beta=0.3, loss_type=loss_type, desirable_weight=1.5, undesirable_weight=0.6)
    points = []

    def theirs(model):
        loss, point = kto_of_trl(answers, labels, dpo, model)
        points.append(point)
        return loss

    value = check(partial(kto_loss, answers, labels, dpo), theirs)
    assert (points[0] > 0) == (is_above_0 and loss_type == 'kto')
    # Negative control: exchanged labels.
    exchanged = kto_loss(answers, [not label for label in labels], dpo, POLICY)
    assert abs(float(exchanged) - value) > 1e-3


# Settings of maxlm, and of TRL.
REWARDS = {
    'grpo': ({'loss_type': 'grpo'}, {'loss_type': 'grpo'}),
    'dr_grpo': ({'loss_type': 'dr_grpo'}, {'loss_type': 'dr_grpo'}),
    'dapo': ({'loss_type': 'dapo'}, {'loss_type': 'dapo'}),
    # The normalizations differ only if there are several micro-batches.
    'bnpo': ({'loss_type': 'dapo'}, {'loss_type': 'bnpo'}),
    'gspo': ({'loss_type': 'gspo'}, {'loss_type': 'grpo', 'importance_sampling_level': 'sequence'}),
    'without KL': ({'loss_type': 'dapo', 'kl_coef': 0.0}, {'loss_type': 'dapo', 'beta': 0.0}),
    # The largest ratio.
    'cispo': ({'loss_type': 'cispo', 'epsilon_high': 1.1}, {'loss_type': 'cispo', 'epsilon_high': 1.1}),
    'entropy bonus': (
        {'loss_type': 'dapo', 'entropy_coef': 0.05},
        {'loss_type': 'dapo', 'entropy_coef': 0.05, '_entropy_bonus_enabled': True, 'use_adaptive_entropy': False},
    ),
    # The mode token_truncate of TRL with the largest weight CAP.
    'truncated importance sampling': (
        {'loss_type': 'dapo', 'max_staleness': 1, 'importance_sampling_cap': CAP},
        {'loss_type': 'dapo', 'use_vllm': True, 'vllm_importance_sampling_correction': True},
    ),
}
RESPONSES = make_answers(6, seed=7)
ADVANTAGES = np.array([1.2, -0.4, 0.3, -1.1, 0.8, -0.9], np.float32)


def grpo_of_trl(settings, model):
    prompts, completions = ([each[i] for each in RESPONSES] for i in (0, 1))
    batch = {}
    for name, lists in (('prompt', prompts), ('completion', completions)):
        length = max(map(len, lists))
        # TRL pads prompts on the left and completions on the right.
        pads = [[0] * (length - len(ids)) for ids in lists]
        rows = [(pad, ids) if name == 'prompt' else (ids, pad) for pad, ids in zip(pads, lists, strict=True)]
        batch[f'{name}_ids'] = torch.tensor([a + b for a, b in rows])
        kept = [[0] * len(pad) + [1] * len(ids) for pad, ids in zip(pads, lists, strict=True)]
        batch[f'{name}_mask'] = torch.tensor([row if name == 'prompt' else row[::-1] for row in kept])
    trainer = make_trainer(
        GRPOTrainer,
        model,
        **{
            'beta': 0.2,
            'importance_sampling_level': 'token',
            'epsilon_low': 0.1,
            'epsilon_high': 0.15,
            'max_completion_length': LONGEST,
            'top_entropy_quantile': 1.0,
            'off_policy_mask_threshold': None,
            'use_vllm': False,
            'current_gradient_accumulation_steps': 1,
            '_entropy_bonus_enabled': False,
            **settings,
        },
    )
    ids, mask = (torch.cat([batch[f'prompt_{x}'], batch[f'completion_{x}']], 1) for x in ('ids', 'mask'))
    kept = batch['completion_ids'].shape[1]
    with torch.no_grad():
        for name, logits in (('old', OLD_POLICY), ('ref', REFERENCE), ('sampling', SAMPLING_POLICY)):
            found = trainer._get_per_token_logps_and_entropies(Bigram(logits), ids, mask, kept)
            batch[f'{name}_per_token_logps'] = found[0]
        ratio = torch.exp(batch['old_per_token_logps'] - batch['sampling_per_token_logps'])
        batch['importance_sampling_ratio'] = torch.clamp(ratio, max=CAP)
        assert 0.1 < (ratio > CAP)[batch['completion_mask'] > 0].float().mean() < 0.9
    batch |= {'advantages': torch.tensor(ADVANTAGES), 'num_items_in_batch': batch['completion_mask'].sum()}
    return trainer.compute_loss(model, batch)


def grpo_loss(settings, policy):
    grpo = GrpoConfig(
        **{'epsilon': 0.1, 'epsilon_high': 0.15, 'kl_coef': 0.2, 'max_completion_length': LONGEST, **settings}
    )
    batch = pack(*([response] for response in RESPONSES))
    predicted = batch['weights']
    weights = token_weights(predicted, np.ones(len(RESPONSES)), grpo)
    found = log_probs(policy, batch)
    entropies = -(jax.nn.softmax(policy) * jax.nn.log_softmax(policy)).sum(-1)
    sums = policy_sums(
        found,
        entropies[batch['tokens']],
        log_probs(REFERENCE, batch) if grpo.kl_coef else None,
        old_log_probs_BT=log_probs(SAMPLING_POLICY if grpo.max_staleness else OLD_POLICY, batch),
        advantages_BT=jnp.broadcast_to(jnp.array(ADVANTAGES)[:, None], found.shape),
        predicted_BT=predicted,
        weights_BT=weights,
        config=grpo,
        proximal_BT=log_probs(OLD_POLICY, batch) if grpo.max_staleness else None,
    )
    is_budget = grpo.loss_type == 'dr_grpo'
    return sums.objective / (len(RESPONSES) * LONGEST if is_budget else weights.sum())


def test_some_ratios_are_clipped():
    batch = pack(*([response] for response in RESPONSES))
    ratios = np.exp(log_probs(POLICY, batch) - log_probs(OLD_POLICY, batch))[batch['weights'] > 0]
    assert 0.2 < ((ratios < 0.9) | (ratios > 1.15)).mean() < 0.8


@pytest.mark.parametrize('name', REWARDS)
def test_losses_of_rewards(name):
    ours, theirs = REWARDS[name]
    value = check(partial(grpo_loss, ours), partial(grpo_of_trl, theirs))
    # Negative control: no other loss has this value.
    for settings, _ in REWARDS.values():
        if settings != ours:
            assert abs(float(grpo_loss(settings, POLICY)) - value) > 1e-4
