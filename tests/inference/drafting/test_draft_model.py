"""Tests drafts of a small model: the text and its distribution are those of the model without drafts."""

import collections
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.inference import prepared_decoder
from maxlm.inference.drafting import draft_model
from maxlm.inference.engine import model_runner
from maxlm.inference.engine.compiled import MODEL_DRAFT_TOKENS
from maxlm.inference.engine.decode_burst import DecodeBurst
from maxlm.inference.engine.grammar import json_grammar
from maxlm.inference.engine.requests import Request
from maxlm.inference.load import LoadedModel
from maxlm.inference.sampling import Sampling
from tests.inference.engines import GREEDY, MODEL, generate, load, naive_logits, new_engine
from tests.parameters import random_params
from tests.small import small_config, small_layout

FAMILY = 'llama, grouped'
NUM_DRAFT_TOKENS = 3
# The last prompt has three chunks, so that other rows decode between them.
PROMPTS = [[5, 6] * 10, [7], list(range(40, 110))]
SAMPLED = Sampling(temperature=0.7)


@pytest.fixture(scope='module', autouse=True)
def _calls_of_twelve_tokens():
    """Fixes the number of tokens per call, which depends on the speed of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DecodeBurst, 'num_tokens', lambda self, remaining, has_prefill: min(self._max_tokens, 12, *remaining)
        )
        yield


def new_draft(**overrides):
    """Returns a draft model with random parameters and the tokenizer of all families."""
    config = small_config(**{**MODEL, 'model__family': 'llama', **overrides})
    layout = small_layout(config)
    params = random_params(config, layout, std=0.4)
    return LoadedModel(config, layout, params, load(FAMILY).tokenizer, Path('tokenizer.json'), 1)


def similar_draft():
    """Returns a draft model that often agrees with the model of FAMILY: its parameters plus noise."""
    rng = np.random.default_rng(0)

    def moved(x):
        return jax.device_put((x + 0.02 * rng.standard_normal(x.shape)).astype(x.dtype), x.sharding)

    model = load(FAMILY)
    return model._replace(params=jax.tree.map(moved, model.params))


def drafting_engine(draft, model=None, **settings):
    settings = {'num_draft_tokens': NUM_DRAFT_TOKENS, **settings}
    return new_engine(model or load(FAMILY), share=False, all_rows=True, draft=draft, **settings)


def counts(engine, run):
    """Returns the result of `run`, and the drafted tokens, accepted tokens and passes that it needed."""
    before = engine.state
    result, after = run(), engine.state
    return result, *(
        getattr(after, name) - getattr(before, name) for name in ('draft_tokens', 'accepted_tokens', 'passes')
    )


def generated(engine, prompts, **settings):
    return counts(engine, lambda: generate(engine, prompts, **settings))


@pytest.fixture(scope='module')
def plain():
    return new_engine(load(FAMILY), all_rows=True)


@pytest.fixture(scope='module')
def similar():
    return drafting_engine(similar_draft())


@pytest.fixture(scope='module')
def perfect():
    """Returns an engine whose draft model is the model, so that all drafts are accepted."""
    return drafting_engine(load(FAMILY))


@pytest.fixture(scope='module')
def wrong():
    """Returns an engine with the same draft model as `similar` that accepts all its drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model_runner, 'num_accepted', lambda sampled_TB, drafts_KB: jnp.full(sampled_TB.shape[1], len(drafts_KB))
        )
        some = drafting_engine(similar_draft())
        generate(some, PROMPTS, max_tokens=2)
    return some


@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED, Sampling(top_k=20, top_p=0.9, min_p=0.01)])
def test_drafts_do_not_change_the_text(plain, similar, sampling):
    settings = {'sampling': sampling, 'seed': 3, 'max_tokens': 24}
    texts, drafted, accepted, passes = generated(similar, PROMPTS, **settings)
    assert texts == generate(plain, PROMPTS, **settings)
    assert 0 < accepted < drafted
    assert passes < 2 * 23
    for prompt in PROMPTS:
        assert generate(similar, [prompt], **settings) == generate(plain, [prompt], **settings)


def test_accepting_all_drafts_changes_the_text(plain, wrong):
    """Control for the previous test."""
    assert generate(wrong, PROMPTS, max_tokens=24) != generate(plain, PROMPTS, max_tokens=24)


@pytest.mark.parametrize('sampling', [GREEDY, SAMPLED])
def test_drafts_of_the_model_itself_are_accepted(perfect, plain, sampling):
    """A wrong position, token, cache or key of the draft model would lower the number of accepted drafts."""
    settings = {'sampling': sampling, 'seed': 4, 'max_tokens': 25}
    for prompts in ([PROMPTS[0]], PROMPTS):
        texts, drafted, accepted, passes = generated(perfect, prompts, **settings)
        assert texts == generate(plain, prompts, **settings)
        assert accepted == drafted > 0
        if len(prompts) == 1:
            assert passes == 24 // (1 + NUM_DRAFT_TOKENS)
            assert drafted == passes * NUM_DRAFT_TOKENS
            # The last token that the model has read is a draft, which the draft model has read too.
            longer = [[*prompts[0], *texts[0]]]
            found, drafted, accepted, _ = generated(perfect, longer, **{**settings, 'max_tokens': 15})
            assert found == generate(plain, longer, **{**settings, 'max_tokens': 15})
            assert accepted == drafted > 0
    # The last prompt continues the text of a slot, and another slot copies a prefix of it.
    again = [[*PROMPTS[2], *texts[2][:8]], PROMPTS[2][:40]]
    before = perfect.state.cached_tokens
    texts, drafted, accepted, _ = generated(perfect, again, **{**settings, 'max_tokens': 15})
    assert perfect.state.cached_tokens > before
    assert texts == generate(plain, again, **{**settings, 'max_tokens': 15})
    assert accepted == drafted > 0


def test_other_noise_is_accepted_less_often(plain, monkeypatch):
    """Control for the previous test: a draft model that samples with its own keys."""
    keys = draft_model.sampling_keys
    monkeypatch.setattr(draft_model, 'sampling_keys', lambda seed, sample, position: keys(seed + 1, sample, position))
    some = drafting_engine(load(FAMILY))
    settings = {'sampling': Sampling(temperature=1.5), 'seed': 4, 'max_tokens': 25}
    texts, drafted, accepted, _ = generated(some, PROMPTS, **settings)
    assert texts == generate(plain, PROMPTS, **settings)
    assert accepted < drafted / 2


@pytest.mark.parametrize(
    ('family', 'cache'),
    [
        ('windows', 'model'),
        ('stream', 'model'),
        ('latent', 'int8'),
        *(pytest.param(name, 'model', marks=pytest.mark.nightly) for name in ('gemma2', 'experts', 'value embeddings')),
    ],
)
def test_caches_of_every_kind(family, cache):
    """Ring buffers are shorter than the texts, and the stream needs the previous token."""
    model = load(family)
    some, other = drafting_engine(model, model, cache=cache), new_engine(model, all_rows=True, cache=cache)
    settings = {'sampling': SAMPLED, 'max_tokens': 30}
    texts, drafted, accepted, _ = generated(some, PROMPTS, **settings)
    assert texts == generate(other, PROMPTS, **settings)
    assert accepted == drafted > 0
    assert some.cache_bytes == 2 * other.cache_bytes


def test_the_distribution_of_texts_is_that_of_the_model(similar, wrong):
    """Compares frequencies of all texts of three of the two likeliest tokens with the probabilities of the model."""
    prompt, num = PROMPTS[1], 1024
    expected = {(): 1.0}
    for _ in range(3):
        expected = {(*ids, token): p * q for ids, p in expected.items() for token, q in two_likeliest([*prompt, *ids])}

    def statistic(engine):
        requests = [
            Request(tuple(prompt), 3, Sampling(top_k=2), seed=seed, num_samples=128) for seed in range(num // 128)
        ]
        rows, drafted, accepted, _ = counts(engine, lambda: engine.complete(requests))
        assert drafted >= accepted > 50
        found = collections.Counter(tuple(completion.ids) for row in rows for completion in row)
        if not set(found) <= set(expected):
            return np.inf
        return sum((found[ids] - num * p) ** 2 / (num * p) for ids, p in expected.items())

    # The statistic of a chi-squared test with 7 degrees of freedom exceeds 24.3 with probability 0.001.
    assert statistic(similar) < 24.3
    # Control: drafts that the model would not sample.
    assert statistic(wrong) > 24.3


def two_likeliest(ids):
    """Returns the two likeliest next tokens and their probabilities."""
    logits = naive_logits(FAMILY, ids)[-1]
    top = np.argsort(logits)[-2:]
    weights = np.exp(logits[top] - logits[top].max())
    return zip(top.tolist(), weights / weights.sum(), strict=True)


def test_requests_with_penalties_accept_no_drafts(plain, perfect):
    requests = [Request(tuple(prompt), 15, Sampling(temperature=0, presence_penalty=3.0)) for prompt in PROMPTS[:2]]
    rows, drafted, _, _ = counts(perfect, lambda: perfect.complete(requests))
    assert rows == plain.complete(requests)
    assert drafted == 0
    # The draft model has processed these texts too.
    again = [[*prompt, *row[0].ids] for prompt, row in zip(PROMPTS, rows, strict=False)]
    texts, drafted, accepted, _ = generated(perfect, again, max_tokens=12)
    assert texts == generate(plain, again, max_tokens=12)
    assert accepted == drafted > 0


def test_rows_with_and_without_drafts_share_passes(plain, similar):
    requests = [
        Request(tuple(PROMPTS[0]), 20, SAMPLED, seed=1, num_samples=2, top_log_probs=2),
        Request(tuple(PROMPTS[1]), 20, Sampling(frequency_penalty=0.5), seed=2),
        Request(tuple(PROMPTS[2]), 6, GREEDY, grammar=json_grammar({'type': 'array'})),
        Request(tuple(PROMPTS[2]), 20, GREEDY, top_log_probs=1),
    ]
    rows, drafted, accepted, _ = counts(similar, lambda: similar.complete(requests))
    assert 0 < accepted < drafted
    for row, expected in zip(rows, plain.complete(requests), strict=True):
        for completion, other in zip(row, expected, strict=True):
            assert (completion.ids, completion.finish_reason) == (other.ids, other.finish_reason)
            for token, same in zip(completion.tokens, other.tokens, strict=True):
                assert token.log_prob == pytest.approx(same.log_prob, abs=1e-4, nan_ok=True)
                assert [pair[0] for pair in token.top] == [pair[0] for pair in same.top]


def test_a_stop_string_ends_a_text_between_drafts(plain, similar):
    (text,) = generate(plain, [PROMPTS[0]], sampling=SAMPLED, seed=6, max_tokens=24)
    stop = load(FAMILY).tokenizer.decode([token for token in text if token < 128][-2:-1])
    request = Request(tuple(PROMPTS[0]), 24, SAMPLED, seed=6, stops=(stop,))
    ((completion,),), ((expected,),) = similar.complete([request]), plain.complete([request])
    assert completion.finish_reason == expected.finish_reason == 'stop'
    assert (completion.text, completion.ids) == (expected.text, expected.ids)


@pytest.mark.parametrize('vocab_size', [250, 300])
def test_models_of_other_families_and_vocabularies_draft(plain, vocab_size):
    """Prompts contain an id that the smaller vocabulary lacks."""
    some = drafting_engine(new_draft(model__family='nanochat', model__vocab_size=vocab_size, model__num_layers=1))
    prompts = [[255, 3, 254], [1]]
    settings = {'sampling': Sampling(temperature=2.0), 'max_tokens': 24}
    texts, drafted, _, _ = generated(some, prompts, **settings)
    assert texts == generate(plain, prompts, **settings)
    assert drafted > 0
    history = np.asarray(some._state.history_BS)
    assert history.max() < 257


def test_no_tokens_are_drafted_after_the_context_of_the_draft_model():
    model, context = load('gpt2'), 32
    params = {**model.params, 'position_embedding': model.params['position_embedding'][:context]}
    config = small_config(**{**MODEL, 'model__family': 'gpt2', 'model__max_positions': context})
    some = drafting_engine(LoadedModel(config, small_layout(config), params, *model[3:]), model)
    plain = new_engine(model, all_rows=True)
    # The cache of the draft model ends at `context`, within the text or within the prompt.
    for length, num_drafted in ((20, 12), (60, 0)):
        prompt = list(range(length))
        texts, drafted, accepted, _ = generated(some, [prompt], max_tokens=30)
        assert texts == generate(plain, [prompt], max_tokens=30)
        assert drafted == accepted
        assert num_drafted - NUM_DRAFT_TOKENS <= drafted <= num_drafted


def test_everything_is_compiled_before_it_is_needed():
    some = new_engine(load(FAMILY), share=False, num_slots=2, draft=new_draft(), chunk=32)
    assert some._compiled.max_tokens == 8 * (1 + MODEL_DRAFT_TOKENS)
    some.warm_up()
    programs = (some._compiled._prefill, some._compiled._decode)
    sizes = [program._cache_size() for program in programs]
    assert sizes == [1, 2]
    generate(some, PROMPTS, sampling=SAMPLED)
    assert [program._cache_size() for program in programs] == sizes


def test_devices_share_rows_and_heads(monkeypatch):
    monkeypatch.setattr(prepared_decoder, 'uses_unstacked_layers', lambda config, layout: False)
    model = load(FAMILY, 4, fsdp=2, tensor=2)
    some = drafting_engine(model, model)
    texts, drafted, accepted, _ = generated(some, PROMPTS)
    assert texts == generate(new_engine(load(FAMILY), all_rows=True), PROMPTS)
    assert accepted == drafted > 0
