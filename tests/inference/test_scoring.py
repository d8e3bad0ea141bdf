"""Tests log-likelihoods of continuations against separate forward passes on several meshes, and token windows."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.inference import scoring
from maxlm.inference.load import LoadedModel
from maxlm.inference.prefix_tree import insert
from maxlm.inference.scoring import (
    MIN_ROW_TOKENS,
    Likelihood,
    LogprobScorer,
    ScoringRequest,
    pack,
    scored_indices,
    windows,
)
from maxlm.training.state import abstract_model
from tests.parameters import random_params
from tests.small import EXPERTS, LATENT, STREAM, small_config, small_layout

CONTEXT = 96
VOCAB = 257
# The vocabulary has more rows than the tokenizer, and an odd number, which devices cannot split equally.
MODEL = {'model__dim': 16, 'model__vocab_size': 263, 'model__max_positions': CONTEXT}
FAMILIES = {
    'gpt2': {'model__family': 'gpt2'},
    'llama': {'model__family': 'llama', 'model__num_kv_heads': 2, 'model__logit_softcap': 5.0},
    'experts': EXPERTS,
    'windows': {'model__family': 'llama', 'model__sliding_window': 9, 'model__attention_pattern': 'SL'},
    'latents': LATENT,
    'sinks': {'model__family': 'llama', 'model__attention_sinks': True},
    'value embeddings': {'model__family': 'llama', 'model__value_embedding_pattern': 'V'},
    'stream': {'model__family': 'gpt2', 'model__num_layers': 3, **STREAM},
    'dynamic': {'model__family': 'llama', 'model__rope_scaling': 'dynamic', 'model__rope_scaling_factor': 2.0},
}
MESHES = {
    'one device': {},
    'data and tensor': {'mesh__data': 2, 'mesh__tensor': 2, 'mesh__fsdp': 2},
    'context': {'mesh__context': 2, 'mesh__data': 1, 'mesh__fsdp': 4},
    'stages': {'mesh__stage': 2, 'mesh__data': 4, 'train__per_device_batch_size': 1},
}


@functools.cache
def load(family='llama', mesh='one device'):
    axes = MESHES[mesh]
    config = small_config(num_devices=8 if axes else 1, **{**MODEL, **FAMILIES[family], **axes})
    layout = small_layout(config)
    params = random_params(config, layout, std=0.3)
    return LoadedModel(config, layout, params, bytes_tokenizer(), Path('tokenizer.json'), 1)


@functools.cache
def scorer(family='llama', mesh='one device'):
    return LogprobScorer(load(family, mesh))


@functools.cache
def forward(family):
    model = load(family)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))

    @jax.jit
    def log_probs(params, tokens_1T):
        decoder = nnx.merge(graph, params)
        return jax.nn.log_softmax(decoder.logits(decoder(tokens_1T)[0])[0])

    return lambda tokens: np.asarray(log_probs(model.params, np.array([tokens], np.int32)))


def naive(family, span):
    """Scores a span with one forward pass over the complete text."""
    text = [*span.context, *span.continuation][-(CONTEXT + 1) :]
    # Later tokens do not affect a position, so one padded length serves all texts.
    log_probs = forward(family)([*text[:-1], *[0] * (CONTEXT + 1 - len(text))])
    places = range(len(text) - 1 - len(span.continuation), len(text) - 1)
    found = [log_probs[place, token] for place, token in zip(places, span.continuation, strict=True)]
    likeliest = [int(np.argmax(log_probs[place])) for place in places]
    return Likelihood(float(np.sum(found)), likeliest == list(span.continuation))


@functools.cache
def spans():
    """Returns contexts and continuations of all lengths. Some share a context, are too long, or are greedy."""
    rng = np.random.default_rng(0)

    def text(length):
        return rng.integers(0, VOCAB, length).tolist()

    made = [ScoringRequest(text(context), text(rng.integers(1, 9))) for context in rng.integers(1, CONTEXT + 30, 40)]
    shared = text(20)
    made += [ScoringRequest(shared, [choice]) for choice in (1, 2, 3)] + [
        ScoringRequest(shared, text(4)),
        ScoringRequest(text(1), text(CONTEXT)),
    ]
    for context in (shared, text(7)):
        tokens = list(context)
        for _ in range(3):
            padded = [*tokens, *[0] * (CONTEXT - len(tokens))]
            tokens.append(int(np.argmax(forward('llama')(padded)[len(tokens) - 1])))
        made.append(ScoringRequest(context, tokens[len(context) :]))
    return made


def agree(found, expected):
    assert [score.is_greedy for score in found] == [score.is_greedy for score in expected]
    np.testing.assert_allclose([s.log_prob for s in found], [s.log_prob for s in expected], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope='module')
def expected():
    """Returns the scores of the spans, computed one by one."""
    return [naive('llama', span) for span in spans()]


@pytest.fixture(scope='module')
def found():
    return scorer().score(spans())


def test_each_span_is_scored_as_if_alone(expected, found):
    agree(found, expected)
    assert {score.is_greedy for score in expected} == {False, True}


def test_learned_positions_start_with_each_text():
    agree(scorer('gpt2').score(spans()), [naive('gpt2', span) for span in spans()])


def test_neither_batches_nor_the_order_matter(expected):
    # Small batches group the rows differently.
    agree(LogprobScorer(load(), batch_tokens=MIN_ROW_TOKENS).score(spans()[::-1])[::-1], expected)


def test_length_dependent_rotations_score_texts_separately():
    few = spans()[:3] + spans()[-2:]
    rows = [row for rows, _ in scorer('dynamic')._batches([10, 20, 30]) for row in rows]
    assert rows == [[2], [1], [0]]
    assert [row for rows, _ in scorer()._batches([10, 20, 30]) for row in rows] == [[2, 1, 0]]
    found = scorer('dynamic').score(few)
    agree(found[3:], scorer('dynamic').score(few[3:]))
    assert len({score.log_prob for score in found}) == 5


def test_off_by_one_spans_are_detected(expected, found, monkeypatch):
    monkeypatch.setattr(scoring, 'scored_indices', lambda length, num: range(length - num - 1, length - 1))
    with_context = [number for number, span in enumerate(spans()) if len(span.context) > 1]
    wrong = scorer().score([spans()[number] for number in with_context])
    with pytest.raises(AssertionError):
        agree(wrong, [expected[number] for number in with_context])


def test_texts_in_one_row_do_not_attend_to_each_other(expected, found, monkeypatch):
    original = scoring._batch_arrays

    def one_segment(rows, B, T):
        tokens, segments, ends, positions, previous = original(rows, B, T)
        return tokens, np.minimum(segments, 1), np.full_like(ends, T), positions, previous

    # Texts are scored as documents and as trees.
    alone = [number for number, span in enumerate(spans()) if len(span.context) > 20]
    agree(scorer().score([spans()[number] for number in alone]), [expected[number] for number in alone])
    monkeypatch.setattr(scoring, '_batch_arrays', one_segment)
    with pytest.raises(AssertionError):
        agree(scorer().score([spans()[number] for number in alone]), [expected[number] for number in alone])
    with pytest.raises(AssertionError):
        agree(scorer().score(spans()), expected)


@pytest.mark.parametrize('mesh', [name for name in MESHES if name != 'one device'])
def test_the_mesh_does_not_matter(mesh, found):
    agree(scorer('llama', mesh).score(spans()), found)


def test_identical_texts_are_read_once(found, monkeypatch):
    read = []
    original = scoring._batch_arrays
    monkeypatch.setattr(scoring, '_batch_arrays', lambda rows, B, T: read.append(rows) or original(rows, B, T))
    choices = [ScoringRequest([5, 6, 7], [choice]) for choice in range(10)]
    scorer().score([*choices, ScoringRequest([5, 6, 8], [1])])
    ((row,),) = read
    assert [tree.tokens.tolist() for tree in row] == [[5, 6, 7], [5, 6, 8]]


@pytest.mark.parametrize('family', ['llama', 'windows', 'latents', 'sinks', 'experts', 'value embeddings', 'stream'])
def test_common_prefixes_are_read_once(family, monkeypatch):
    """Few-shot examples precede all questions, and a question precedes its answers.

    Some texts are prefixes of others.
    """
    rng = np.random.default_rng(3)
    examples = rng.integers(0, VOCAB, 40).tolist()
    requests = []
    for _ in range(3):
        question = [*examples, *rng.integers(0, VOCAB, 12).tolist()]
        answers = [rng.integers(0, VOCAB, length).tolist() for length in (1, 3, 7)]
        requests += [ScoringRequest(question, answer) for answer in (*answers, [*answers[2], 9])]
    requests = [requests[number] for number in rng.permutation(len(requests))]
    expected = [naive(family, span) for span in requests]
    read = []
    original = scoring._batch_arrays
    monkeypatch.setattr(scoring, '_batch_arrays', lambda rows, B, T: read.append(rows) or original(rows, B, T))
    found = scorer(family).score(requests)
    agree(found, expected)
    ((row,),) = read
    # The tokens are the examples, three questions, and the answers of each without their last tokens.
    texts = [[*span.context, *span.continuation[:-1]] for span in requests]
    beginnings = {tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)}
    assert [len(tree.tokens) for tree in row] == [len(beginnings)]
    assert len(beginnings) <= 40 + 3 * (12 + 2 + 7)
    # Control: without sharing, the texts are read as separate documents.
    monkeypatch.setattr(scoring, 'insert', lambda texts, max_tokens: insert(texts, max_tokens=0))
    agree(scorer(family).score(requests), expected)
    assert sum(len(tree.tokens) for rows in read[1:] for row in rows for tree in row) > 4 * len(row[0].tokens)


def test_batches_have_few_shapes():
    small = LogprobScorer(load(), batch_tokens=2 * MIN_ROW_TOKENS)
    lengths = [1000, 900, 400, *[100] * 60, 90]
    batches = list(small._batches(lengths))
    # All batches are full except the last.
    assert [(T, small._padded_rows(len(rows), T)) for rows, T in batches] == [(1024, 1)] * 3 + [(512, 2)] * 6 + [
        (512, 1)
    ]
    assert sorted(number for rows, _ in batches for row in rows for number in row) == list(range(64))


def test_rows_are_filled():
    lengths = [70, 60, 50, 40, 30, 20, 10, 10]
    rows = pack(range(8), lengths, 100)
    assert sorted(number for row in rows for number in row) == list(range(8))
    assert [sum(lengths[number] for number in row) for row in rows] == [100, 100, 90]


def test_logits_of_few_positions(monkeypatch):
    """Texts with one scored token each need logits of few positions."""
    some, computed = scorer(), []
    original = some._score_tokens

    def counted(params, hidden_BTD, row_P, column_P, target_P):
        computed.append(len(row_P))
        return original(params, hidden_BTD, row_P, column_P, target_P)

    monkeypatch.setattr(some, '_score_tokens', counted)
    rng = np.random.default_rng(5)
    few = [ScoringRequest(rng.integers(0, VOCAB, 20).tolist(), [3]) for _ in range(6)]
    many = [ScoringRequest([number], rng.integers(0, VOCAB, CONTEXT).tolist()) for number in range(5)]
    agree(some.score(few), [naive('llama', span) for span in few])
    assert computed == [scoring.LOGITS_SIZES[0]]
    computed.clear()
    agree(some.score(many), [naive('llama', span) for span in many])
    assert 5 * CONTEXT <= sum(computed) < 5 * CONTEXT + sum(scoring.LOGITS_SIZES)
    assert set(computed) <= set(scoring.LOGITS_SIZES)


def test_slots_that_are_scored():
    assert list(scored_indices(5, 2)) == [3, 4]
    assert list(scored_indices(1, 1)) == [0]


@pytest.mark.parametrize('length', [0, 1, 7, 8, 9, 16, 17, 30])
def test_windows_equal_those_of_lm_eval(length):
    utils = pytest.importorskip('lm_eval.utils')
    tokens = list(range(100, 100 + length))
    theirs = utils.get_rolling_token_windows(tokens, prefix_token=0, max_seq_len=8, context_len=1)
    assert windows(tokens, [0], 8) == [tuple(utils.make_disjoint_window(pair)) for pair in theirs]
    # Each token is scored once.
    assert [token for span in windows(tokens, [0], 8) for token in span.continuation] == tokens


def test_spans_that_cannot_be_scored(found):
    for span, message in (
        (ScoringRequest([], [1]), 'request 1: its context must not be empty'),
        (ScoringRequest([1], []), 'request 1: its continuation must not be empty'),
        (ScoringRequest([263], [1]), 'request 1: token id 263 is not below model.vocab_size=263'),
        (
            ScoringRequest([1], [2] * (CONTEXT + 1)),
            f'has {CONTEXT + 1} tokens; it must have at most {CONTEXT}, the context length of the model',
        ),
    ):
        with pytest.raises(InputError, match=message):
            scorer().score([ScoringRequest([1], [2]), span])
    assert scorer().score([]) == []
