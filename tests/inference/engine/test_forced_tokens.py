"""Tokens that a grammar forces, and tokens sampled with a mask before the grammar has seen the previous one."""

import itertools

import jax
import jax.numpy as jnp
import llguidance
import numpy as np
import pytest

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.inference.engine import grammar_worker
from maxlm.inference.engine.compiled_grammar import COMPLETE, CONTINUES, MaskResult
from maxlm.inference.engine.decode_burst import DecodeBurst
from maxlm.inference.engine.grammar import json_grammar
from maxlm.inference.engine.grammar_worker import is_same_sample, make_vocabulary, only_token
from maxlm.inference.engine.requests import Request
from maxlm.inference.engine.sequence import ActiveSequence
from maxlm.inference.sampling import Sampling, sample_rows, sampling_keys, stack_settings
from tests.inference.engines import GREEDY, NUM_IDS, PROMPTS, load, naive, naive_logits, new_engine

FAMILY = 'llama, grouped'
SCHEMA = {
    'type': 'object',
    'properties': {
        'name': {'type': 'string', 'minLength': 6, 'maxLength': 14},
        'size': {'type': 'integer', 'minimum': 0, 'maximum': 99},
        'kinds': {'enum': ['alpha', 'alphabet']},
    },
    'required': ['name', 'size', 'kinds'],
    'additionalProperties': False,
}
MAX_TOKENS = 85
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=1.5),
    Sampling(temperature=2.0, top_k=20),
    Sampling(temperature=0.9, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
]


def request(sampling=GREEDY, prompt=1, schema=SCHEMA, max_tokens=MAX_TOKENS, **settings):
    return Request(tuple(PROMPTS[prompt]), max_tokens, sampling, seed=3, grammar=json_grammar(schema), **settings)


def vocabulary():
    tokenizer = bytes_tokenizer()
    end = tokenizer.end_of_document
    return make_vocabulary(
        {'size': tokenizer.vocab_size, 'end_ids': [end], 'end': end, 'tokenizer': tokenizer.marked_json()}
    )


@jax.jit
def sampled(logits_BV, position_B, rows):
    """Samples from logits with the seed of `request`."""
    zeros_B = jnp.zeros(position_B.shape, jnp.uint32)
    return sample_rows(logits_BV, sampling_keys(zeros_B + 3, zeros_B, position_B), rows)


def reference(sampling, prompt=1, max_tokens=MAX_TOKENS):
    """Returns the tokens of `request(sampling)`, sampled one at a time from logits without a cache."""
    matcher = llguidance.LLMatcher(vocabulary(), json_grammar(SCHEMA))
    tokens = list(PROMPTS[prompt])
    start = len(tokens)
    while len(tokens) < start + max_tokens and not matcher.is_stopped():
        words = np.zeros(-(-NUM_IDS // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.unpackbits(words.view(np.uint8), bitorder='little')[:NUM_IDS] == 1
        logits = np.where(allowed, naive_logits(FAMILY, tokens)[-1], -np.inf)
        tokens.append(int(sampled(logits[None], np.array([len(tokens) - 1]), stack_settings([sampling]))[0]))
        assert matcher.consume_token(tokens[-1])
    return tokens[start:]


def fresh_engine(**settings):
    """Returns an engine whose calls do not depend on the time that they take."""
    some = new_engine(load(FAMILY), all_rows=True, **settings)
    some._burst = DecodeBurst(some._compiled.max_tokens, clock=lambda: 0.0)
    return some


def one_by_one(monkeypatch):
    """Makes each call generate one token, without jumps."""
    monkeypatch.setattr(ActiveSequence, 'jump', lambda self, **kwargs: None)
    monkeypatch.setattr(ActiveSequence, 'max_call_tokens', 1)


@pytest.mark.parametrize('sampling', SAMPLINGS)
def test_texts_are_those_of_single_tokens_in_fewer_passes(sampling, monkeypatch):
    expected = reference(sampling)
    some = fresh_engine()
    ((found,),) = some.complete([request(sampling)])
    assert found.ids == expected
    assert found.finish_reason == ('stop' if len(expected) < MAX_TOKENS else 'length')
    state = some.state
    # `{"name":"`, `","size":`, `,"kinds":"alpha` and so on.
    assert state.accepted_tokens > 20
    assert state.passes < len(expected) - 1
    # Control: without these calls there is a pass for each token but the first, whose pass is that of the prompt.
    one_by_one(monkeypatch)
    slow = fresh_engine()
    ((alone,),) = slow.complete([request(sampling)])
    assert alone.ids == expected
    assert slow.state.passes == len(expected) - 1
    assert slow.state.accepted_tokens == 0


def test_a_wrong_forced_token_changes_the_text(monkeypatch):
    """Control of the tests above: they notice a forced token that is not what the grammar says."""
    jump = ActiveSequence.jump

    def wrong(self, **kwargs):
        chunk = jump(self, **kwargs)
        return chunk and chunk._replace(tokens=(*chunk.tokens[:-1], 0))

    monkeypatch.setattr(ActiveSequence, 'jump', wrong)
    ((found,),) = fresh_engine().complete([request()])
    assert found.ids != reference(GREEDY)


def test_dropped_tokens_leave_the_state(monkeypatch):
    """Control of the tests above: some tokens are dropped, and the text changes if the devices keep them."""
    some, dropped = fresh_engine(), []
    monkeypatch.setattr(some._compiled, 'rewind', lambda state, positions: dropped.extend(positions) or state)
    texts = [some.complete([request(sampling)])[0][0].ids for sampling in SAMPLINGS[:3]]
    assert dropped
    assert texts != [reference(sampling) for sampling in SAMPLINGS[:3]]


def test_log_probs_of_forced_tokens():
    """Requests with log-probabilities do not jump, because the pass gives none."""
    some = fresh_engine()
    ((found,),) = some.complete([request(top_log_probs=2)])
    assert found.ids == reference(GREEDY)
    assert some.state.accepted_tokens == 0
    tokens = PROMPTS[1] + found.ids
    logits = naive_logits(FAMILY, tokens)[len(PROMPTS[1]) - 1 : -1].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = log_probs[np.arange(len(found.ids)), found.ids]
    np.testing.assert_allclose([token.log_prob for token in found.tokens], expected, atol=1e-3)


@pytest.mark.parametrize('settings', [{'num_draft_tokens': 3}, {'chunk': 5}])
def test_samples_beside_each_other(settings):
    """Samples with and without a grammar, penalties and drafts do not affect each other."""
    requests = [
        request(Sampling(temperature=1.5)),
        Request(tuple(PROMPTS[0]), 40, GREEDY),
        request(Sampling(temperature=1.5, repetition_penalty=1.3)),
        request(GREEDY, max_tokens=20),
        request(Sampling(temperature=1.2, top_p=0.9), prompt=0),
    ]
    some = fresh_engine(**settings)
    alone = [some.complete([each])[0][0] for each in requests]
    together = [samples[0] for samples in fresh_engine(**settings).complete(requests)]
    assert together == alone
    assert alone[0].ids == reference(requests[0].sampling)
    assert alone[3].ids == reference(GREEDY, max_tokens=20)
    assert alone[3].finish_reason == 'length'
    assert alone[4].ids == reference(requests[4].sampling, prompt=0)


@pytest.mark.parametrize('draft', ['', 'windows', FAMILY])
def test_drafts_with_a_grammar(draft, monkeypatch):
    """Drafts, jumps and dropped tokens together change no text, with a grammar or beside it.

    Drafts come from the preceding text, from another model with ring buffers, or from the model itself. All of the
    latter are accepted, unless the cache of the draft model lacks a token or contains a wrong one.
    """
    requests = [
        request(),
        Request(tuple(PROMPTS[0]), 40, GREEDY),
        request(Sampling(temperature=1.5)),
        request(Sampling(temperature=1.5, repetition_penalty=1.3)),
        request(Sampling(temperature=1.2, top_p=0.9), prompt=0),
        Request((*PROMPTS[0], *naive(FAMILY, PROMPTS[0])), 20, Sampling(temperature=0.7), seed=2),
    ]
    some, calls = fresh_engine(num_draft_tokens=3, draft=load(draft) if draft else None), []
    rewind, jump = some._compiled.rewind, ActiveSequence.jump
    monkeypatch.setattr(some._compiled, 'rewind', lambda *args: calls.append('rewind') or rewind(*args))

    def counted_jump(self, **limits):
        chunk = jump(self, **limits)
        calls.extend(['jump'] * (chunk is not None))
        return chunk

    with monkeypatch.context() as patch:
        patch.setattr(ActiveSequence, 'jump', counted_jump)
        alone = [some.complete([each])[0][0] for each in requests]
        assert {'rewind', 'jump'} == set(calls)
        together = [samples[0] for samples in some.complete(requests)]
    drafted, accepted = some.state.draft_tokens, some.state.accepted_tokens
    assert (accepted == drafted > 0) if draft == FAMILY else (0 < accepted < drafted), (accepted, drafted)
    one_by_one(monkeypatch)
    expected = [fresh_engine().complete([each])[0][0] for each in requests]
    for found in (alone, together):
        assert [(each.ids, each.finish_reason) for each in found] == [
            (each.ids, each.finish_reason) for each in expected
        ]
    assert alone[2].ids == reference(requests[2].sampling)


def test_a_stop_string_within_forced_tokens():
    some = fresh_engine()
    ((found,),) = some.complete([request(stops=('"si',))])
    text = bytes(reference(GREEDY)).decode(errors='replace')
    assert (found.text, found.finish_reason) == (text[: text.index('"si')], 'stop')
    # The slot holds the tokens before the end, and may be reused.
    ((again,),) = some.complete([request()])
    assert again.ids == reference(GREEDY)


def test_only_token():
    words = np.zeros(9, np.int32)
    assert only_token(words) is None
    for token in (0, 31, 32, 257):
        one = words.copy()
        one.view(np.uint32)[token // 32] = 1 << token % 32
        assert only_token(one) == token
        for other in (1, 31, 63, 200):
            two = one.copy()
            two.view(np.uint32)[other // 32] |= 1 << other % 32
            assert (only_token(two) is None) == (other != token)


def test_a_sample_of_one_mask_is_that_of_another():
    """Compares the rule with samples of both masks, over all pairs of masks of four tokens."""
    positions = np.arange(40)
    logits = np.random.default_rng(0).normal(size=4)
    samples = {}
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2)):
        for mask in range(1, 16):
            row = np.where(mask >> np.arange(4) & 1, logits, -np.inf).astype(np.float32)
            samples[mask] = np.asarray(sampled(np.tile(row, (40, 1)), positions, stack_settings([sampling] * 40)))
        num_different = 0
        for mask, other in itertools.product(samples, samples):
            words, other_words = np.array([mask], np.int32), np.array([other], np.int32)
            for token, expected in zip(samples[other], samples[mask], strict=True):
                if is_same_sample(int(token), words, other_words, is_truncated=sampling.is_truncated):
                    assert token == expected
                num_different += token != expected
        # Control: other pairs of masks have different samples.
        assert num_different


@pytest.mark.parametrize('schema', [{'const': 'a<|endoftext|>b'}, {'enum': ['a<|endoftext|>b', 1]}])
def test_the_name_of_an_end_token_is_text(schema):
    """The id of the end token would end the response in the middle of a string."""
    worker = grammar_worker._Worker()
    worker.vocabulary = vocabulary()
    worker.compile(json_grammar(schema))
    result = worker.next_mask(1, list(b'"'), is_truncated=False)
    assert (bytes(result.forced), result.state[:1]) == (b'a<|endoftext|>b', CONTINUES)
    assert worker.next_mask(1, list(b'"'), is_truncated=False) == MaskResult(1, (), COMPLETE)


@pytest.mark.parametrize('is_slow', [False, True])
def test_results_of_the_process(is_slow, monkeypatch):
    """The last token is sampled. Masks that take long come in several results, because the time of one is limited."""
    monkeypatch.setattr(grammar_worker, '_is_slow', lambda start: is_slow)
    worker = grammar_worker._Worker()
    worker.vocabulary = vocabulary()
    worker.compile(json_grammar({'enum': ['abc', 'abd', 'x' * 20]}))
    first = worker.next_mask(1, list(b'"'), is_truncated=False)
    assert (first.num_accepted, first.forced, first.state[:1]) == (1, (), CONTINUES)
    assert MaskResult.from_bytes(first.to_bytes()) == first
    # The second token has another mask than the first, which excludes it.
    second = worker.next_mask(1, list(b'aa'), is_truncated=False)
    assert (second.num_accepted, second.forced) == (1, () if is_slow else tuple(b'b'))
    if is_slow:
        worker.next_mask(1, list(b'b'), is_truncated=False)
    third = worker.next_mask(1, list(b'c'), is_truncated=False)
    assert (third.num_accepted, third.forced, third.state[:1]) == (1, (), CONTINUES)
    assert worker.next_mask(1, list(b'"'), is_truncated=False) == MaskResult(1, (), COMPLETE)
    assert worker.next_mask(2, list(b'"'), is_truncated=False) == first
    forced = worker.next_mask(2, list(b'x'), is_truncated=False).forced
    assert forced == (() if is_slow else tuple(b'x' * 19))
