"""Tests continuous batching against forward passes over the complete text; `test_engine_caches.py` tests the caches."""

import math
import threading
import types

import numpy as np
import pytest

from maxlm.data.tokenizer.text_boundaries import TextBoundaries
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.compiled_grammar import ALL_TOKENS, num_words
from maxlm.inference.engine.decode_burst import DecodeBurst
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.grammar import json_grammar
from maxlm.inference.engine.requests import QueueFullError, Request
from maxlm.inference.engine.slots import Slot
from maxlm.inference.sampling import Sampling
from tests.inference.engines import (
    GREEDY,
    MAX_TOKENS,
    NUM_IDS,
    PROMPTS,
    embed,
    engine,
    generate,
    likeliest,
    load,
    mean_hidden_state,
    naive,
    naive_logits,
    new_engine,
    requests_of,
)

FAMILY = 'llama, grouped'


@pytest.fixture(scope='module')
def shared():
    """Returns an engine of `FAMILY` with compiled functions. Its slots may contain anything."""
    some = engine(FAMILY)
    some.warm_up()
    naive_logits(FAMILY, PROMPTS[0])
    return some


@pytest.fixture
def fresh(shared):
    """Returns an engine with the same compiled functions and empty slots."""
    return new_engine(load(FAMILY))


def test_cached_equals_uncached(shared):
    expected = [naive(FAMILY, prompt) for prompt in PROMPTS]
    assert generate(shared, PROMPTS) == expected
    # Control: prompts matter, and the model does not just repeat one token.
    assert len({tuple(row) for row in expected}) == len(PROMPTS)
    assert all(len(set(row)) > 1 for row in expected)


@pytest.mark.parametrize(
    'family',
    [
        'windows',
        'nanochat',
        'experts',
        'value embeddings',
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ('gpt_neox', 'qwen3', 'gemma2', 'smollm3', 'linear', 'yarn', 'llama3')
        ),
        pytest.param('dynamic', marks=pytest.mark.nightly),
    ],
)
def test_every_family_equals_uncached(family):
    rows = generate(new_engine(load(family), share=False, all_rows=True), PROMPTS)
    assert rows == [likeliest(family, prompt, row) for prompt, row in zip(PROMPTS, rows, strict=True)]
    # An untrained model may repeat a token, but not in every row.
    assert any(len(set(row)) > 1 for row in rows)


def test_everything_is_compiled_before_it_is_needed():
    some = new_engine(load('gpt2'), share=False, chunk=40)
    names = []
    some.warm_up(names.append)
    assert names == [
        'drop tokens',
        *(
            f'{name} (cache length 100)'
            for name in ('copy slot', 'decode 1 slots', 'decode 3 slots', 'prefill 32 tokens', 'prefill 40 tokens')
        ),
    ]
    functions = [getattr(some._compiled, name) for name in ('_prefill', '_decode', '_rewind')]
    sizes = [function._cache_size() for function in functions]
    assert sizes == [2, 2, 1]
    rows = generate(some, PROMPTS)
    assert rows == [likeliest('gpt2', prompt, row) for prompt, row in zip(PROMPTS, rows, strict=True)]
    some.complete(requests_of(PROMPTS, Sampling(top_p=0.5, min_p=0.1), top_log_probs=5))
    # This grammar also drops tokens, and jumps over others.
    words = {'type': 'array', 'items': {'type': 'string', 'maxLength': 12}, 'minItems': 3}
    schema = {'type': 'object', 'properties': {'words': words}, 'required': ['words']}
    some.complete(requests_of(PROMPTS, Sampling(), max_tokens=30, grammar=json_grammar(schema)))
    assert some.state.accepted_tokens
    assert [function._cache_size() for function in functions] == sizes


@pytest.mark.parametrize('draw', ['one', 'most', 'any'])
def test_the_number_of_tokens_of_a_call_does_not_matter(shared, draw, monkeypatch):
    """Results do not depend on the token of a call at which a text ends."""
    sampled = {'sampling': Sampling(temperature=2.0), 'seed': 5, 'max_tokens': 25}
    expected = generate(shared, PROMPTS), generate(shared, PROMPTS, **sampled)
    rng = np.random.default_rng(0)
    number = {'one': lambda: 1, 'most': lambda: 8, 'any': lambda: int(rng.integers(1, 9))}[draw]
    monkeypatch.setattr(DecodeBurst, 'num_tokens', lambda self, remaining, has_prefill: min(number(), max(remaining)))
    assert (generate(shared, PROMPTS), generate(shared, PROMPTS, **sampled)) == expected
    # If a sample ends within a call, later tokens are discarded and the slot serves the next request.
    with monkeypatch.context() as patch:
        patch.setattr(shared, '_stop_token_ids', frozenset({expected[1][1][9]}))
        ended = shared.complete(requests_of(PROMPTS, **sampled))
    assert ended[1][0].ids == expected[1][1][: expected[1][1].index(expected[1][1][9])]
    assert ended[1][0].finish_reason == 'stop'
    assert generate(shared, PROMPTS) == expected[0]


def test_overlapping_requests_equal_separate_requests(fresh):
    rng, num = np.random.default_rng(0), 32
    lengths, num_tokens = rng.integers(1, 60, num), rng.integers(1, 30, num)
    prompts = [rng.integers(0, NUM_IDS, length).tolist() for length in lengths]
    # Every second prompt starts with the same prefix.
    prefix = rng.integers(0, NUM_IDS, 30).tolist()
    for prompt in prompts[::2]:
        prompt[:30] = prefix[: len(prompt)]
    requests = [Request(tuple(p), int(n), GREEDY) for p, n in zip(prompts, num_tokens, strict=True)]
    found = {}

    def listen(number):
        def listener(delta):
            assert delta.sample == 0
            found.setdefault(number, []).append(delta)

        return listener

    waiting = list(enumerate(requests))
    while waiting or fresh._has_work:
        for _ in range(rng.integers(0, 4)):
            if waiting:
                number, request = waiting.pop(0)
                fresh.submit(request, listen(number))
        fresh.step()
    together = [[token.id for delta in found[number] for token in delta.tokens] for number in range(num)]
    assert [len(row) for row in together] == num_tokens.tolist()
    assert together == [likeliest(FAMILY, prompt, row) for prompt, row in zip(prompts, together, strict=True)]
    assert [deltas[-1].finish_reason for deltas in (found[n] for n in range(num))] == ['length'] * num
    assert fresh.state.cached_tokens > 0
    # One pass served several requests.
    assert fresh.state.passes < sum(num_tokens) / 2


def test_prefixes_are_shared_by_requests_with_the_same_salt_only(fresh):
    prompt, reused = tuple(PROMPTS[2]), []
    for salt, num_samples in [('', 1), ('', 1), ('a', 1), ('a', 1), ('b', 3), ('', 1)]:
        before = fresh.state.cached_tokens
        fresh.complete([Request(prompt, 1, num_samples=num_samples, cache_salt=salt)])
        reused.append(fresh.state.cached_tokens - before)
    # The second and third sample of a request always reuse its prompt.
    assert reused == [share * (len(prompt) - 1) for share in (0, 1, 0, 1, 2, 0)]


def test_shared_prefixes_are_computed_once(fresh, monkeypatch):
    prompt = PROMPTS[2]
    first = generate(fresh, [prompt])[0]
    assert fresh.state.cached_tokens == 0
    # A prompt that extends the previous response, as in a conversation, reuses all but the last token.
    longer = [*prompt, *first[:-1], 5, 6]
    assert generate(fresh, [longer], max_tokens=4)[0] == naive(FAMILY, longer, max_tokens=4)
    assert fresh.state.cached_tokens == len(prompt) + len(first) - 1
    # This prompt branches off after 40 tokens; the first slot is idle.
    branch = [*prompt[:40], 1, 2, 3]
    assert generate(fresh, [branch], max_tokens=4)[0] == naive(FAMILY, branch, max_tokens=4)
    assert fresh.state.cached_tokens == len(prompt) + len(first) - 1 + 40
    # Control: a slot that claims to share more tokens than it contains changes the text.
    monkeypatch.setattr(Slot, 'num_shared', lambda self, prompt: min(len(prompt), len(self.content)))
    other = [9] * 50
    assert generate(fresh, [other], max_tokens=4)[0] != naive(FAMILY, other, max_tokens=4)


def test_samples_of_a_prompt_share_it_and_differ(fresh):
    request = Request(tuple(PROMPTS[2]), MAX_TOKENS, Sampling(temperature=3.0), seed=4, num_samples=5)
    rows = [sample.ids for sample in fresh.complete([request])[0]]
    assert len({tuple(row) for row in rows}) == 5
    assert fresh.state.cached_tokens == 4 * (len(PROMPTS[2]) - 1)


def test_the_seed_decides(shared):
    sampled = {'sampling': Sampling(temperature=3.0), 'num_samples': 2}

    def draw(seed, prompts=PROMPTS, **settings):
        rows = shared.complete(requests_of(prompts, seed=seed, **sampled, **settings))
        return [[sample.ids for sample in samples] for samples in rows]

    first = draw(0)
    assert draw(0) == first
    # The result depends neither on other requests in the batch nor on the number of tokens.
    assert draw(0, prompts=PROMPTS[1:2]) == first[1:2]
    assert draw(0, max_tokens=5) == [[row[:5] for row in rows] for rows in first]
    other = draw(1)
    assert all(a != b for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True))
    assert max(max(row) for rows in first + other for row in rows) < NUM_IDS


def test_ids_unknown_to_the_tokenizer_are_never_generated(shared):
    assert max(max(row) for row in generate(shared, PROMPTS)) < NUM_IDS
    # Control: without the restriction the model generates such ids.
    assert max(naive(FAMILY, PROMPTS[1], num_ids=1024)) >= NUM_IDS


def test_tokens_without_a_row_are_never_used():
    model = load(FAMILY)
    tokenizer = model.tokenizer.with_special_tokens([f'<|{index}|>' for index in range(2000)])
    assert tokenizer.vocab_size > model.config.model.vocab_size
    larger = new_engine(model._replace(tokenizer=tokenizer), share=False)
    assert max(max(row) for row in generate(larger, PROMPTS[:1])) < model.config.model.vocab_size
    with pytest.raises(InputError, match=f'must be from 0 to {model.config.model.vocab_size - 1}'):
        generate(larger, [[tokenizer.vocab_size - 1]])
    # A mask of a grammar has a bit for each token of the tokenizer.
    mask = np.full(num_words(tokenizer.vocab_size), ALL_TOKENS)
    assert larger._compiled.token_mask([mask]).words_BW.shape[1] == num_words(model.config.model.vocab_size)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def test_log_probabilities(shared):
    sampling = Sampling(temperature=2.0, top_k=5)
    requests = [
        Request(tuple(PROMPTS[1]), 6, sampling, top_log_probs=3),
        Request(tuple(PROMPTS[1]), 6, sampling, top_log_probs=0),
        Request(tuple(PROMPTS[1]), 6, sampling),
    ]
    (with_top,), (chosen,), (none,) = shared.complete(requests)
    assert with_top.ids == chosen.ids == none.ids
    text = list(PROMPTS[1])
    for token, other in zip(with_top.tokens, chosen.tokens, strict=True):
        expected = log_softmax(naive_logits(FAMILY, text)[-1])
        top = np.argsort(-expected)[:3]
        assert [i for i, _ in token.top] == top.tolist()
        np.testing.assert_allclose([value for _, value in token.top], expected[top], atol=1e-4)
        np.testing.assert_allclose([token.log_prob, other.log_prob], expected[token.id], atol=1e-4)
        assert other.top == ()
        text.append(token.id)
    assert all(math.isnan(token.log_prob) for token in none.tokens)
    # Control: log-probabilities differ from those at the sampling temperature.
    cooler = log_softmax(naive_logits(FAMILY, PROMPTS[1])[-1] / 2)
    assert abs(with_top.tokens[0].log_prob - cooler[with_top.ids[0]]) > 1e-2


def test_penalties(shared):
    prompt = PROMPTS[1]
    sampling = Sampling(temperature=0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
    tokens: list[int] = []
    for _ in range(20):
        logits = naive_logits(FAMILY, [*prompt, *tokens])[-1].copy()
        for token in set(prompt) | set(tokens):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in set(tokens):
            logits[token] -= 0.7 + 0.4 * tokens.count(token)
        tokens.append(int(np.argmax(logits)))
    assert generate(shared, [prompt], sampling=sampling, max_tokens=20) == [tokens]
    # Control: penalties change the text, and a slot does not keep the penalties of its previous request.
    plain = generate(shared, [prompt], max_tokens=20)
    assert plain == [naive(FAMILY, prompt, max_tokens=20)] != [tokens]


def with_end(end, chat=None):
    """Returns an engine for a tokenizer whose end-of-document token is `end`."""
    library = bytes_tokenizer()
    boundaries = TextBoundaries(end, (end,))
    tokenizer = types.SimpleNamespace(vocab_size=NUM_IDS, boundaries=boundaries, decode=library.decode)
    return new_engine(load(FAMILY)._replace(tokenizer=tokenizer, chat=chat))


def test_a_text_stops_at_its_end(shared):
    rows = generate(shared, PROMPTS)
    # The end-of-document token occurs in one row and the end-of-turn token in another.
    end, end_of_turn = (next(id for id in row[3:] if id not in rows[2]) for row in rows[:2])
    ending = with_end(end, types.SimpleNamespace(end_of_turn=end_of_turn))
    completions = [samples[0] for samples in ending.complete(requests_of(PROMPTS))]
    for completion, row in zip(completions, rows, strict=True):
        stop = min(row.index(token) if token in row else len(row) for token in (end, end_of_turn))
        assert completion.ids == row[:stop]
        assert completion.finish_reason == ('length' if stop == MAX_TOKENS else 'stop')
    assert {completion.finish_reason for completion in completions} == {'stop', 'length'}
    # Control: `ignore_eos` continues past the end tokens.
    assert generate(ending, PROMPTS, ignore_eos=True) == rows
    # This document ends with its first token.
    assert generate(with_end(rows[0][0]), PROMPTS[:1]) == [[]]


def test_a_text_stops_at_stop_strings(shared):
    request = Request(tuple(PROMPTS[1]), 40, GREEDY)
    ((completion,),) = shared.complete([request])
    decoded = bytes_tokenizer().decode(completion.ids)
    assert completion.text == decoded
    stop = decoded[10:12]
    ((cut,),) = shared.complete([Request(tuple(PROMPTS[1]), 40, GREEDY, stops=('not there', stop))])
    assert (cut.text, cut.finish_reason) == (decoded[: decoded.index(stop)], 'stop')
    assert len(cut.ids) < 40


def test_cancelled_samples_free_their_slots(fresh):
    deltas = {name: [] for name in ('running', 'waiting', 'other')}
    request = Request(tuple(PROMPTS[1]), 80, GREEDY, num_samples=3)
    running = fresh.submit(request, deltas['running'].append)
    waiting = fresh.submit(request, deltas['waiting'].append)
    fresh.submit(Request((1,), 3, GREEDY), deltas['other'].append)
    for _ in range(5):
        fresh.step()
    assert (fresh.state.running, fresh.state.waiting) == (3, 4)
    running.cancel()
    waiting.cancel()
    fresh.step()
    assert [delta.finish_reason for delta in deltas['running'] if delta.finish_reason] == ['cancelled'] * 3
    assert [delta.finish_reason for delta in deltas['waiting'] if delta.finish_reason] == ['cancelled'] * 3
    assert fresh.state.running == 1
    while fresh.step():
        pass
    assert [token.id for delta in deltas['other'] for token in delta.tokens] == naive(FAMILY, [1], max_tokens=3)
    # Cancelling a finished request changes nothing.
    running.cancel()
    fresh.step()
    assert len([delta for delta in deltas['running'] if delta.finish_reason]) == 3


def test_the_queue_is_limited(shared):
    some = new_engine(load(FAMILY), max_queue_size=1)
    request = Request((1,), 2, GREEDY)
    for _ in range(4):
        some.submit(request, lambda delta: None)
    with pytest.raises(QueueFullError, match='the queue is full: 4 samples are waiting'):
        some.submit(request, lambda delta: None)
    while some.step():
        pass
    some.submit(request, lambda delta: None)
    deltas = []
    some.submit(Request((1,), 2, GREEDY, num_samples=3), deltas.append)
    some.fail()
    assert [delta.finish_reason for delta in deltas] == ['failed'] * 3


def test_a_waiting_thread_wakes_up(fresh):
    woken = threading.Event()

    def wait():
        fresh.wait(60)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    fresh.submit(Request((1,), 1, GREEDY), lambda delta: None)
    assert woken.wait(30)
    thread.join()
    while fresh.step():
        pass


def refusal(call):
    with pytest.raises(InputError) as info:
        call()
    assert '\n' not in str(info.value)
    return str(info.value)


def test_requests_that_do_not_fit_are_refused(shared):
    def check(prompt, max_tokens):
        return refusal(lambda: shared.complete([Request((1,), 3, GREEDY), Request(tuple(prompt), max_tokens, GREEDY)]))

    message = check([2] * 90, 11)
    assert message.startswith('max_tokens=11: the prompt has 90 tokens and the context length is 100; use at most 10')
    assert check([1] * 101, 1).endswith('the prompt has 101 tokens and the context length is 100; shorten the prompt')
    assert 'must be from 0 to 256' in check([257], 1)
    assert 'must be from 0 to 256' in check([-1], 1)
    # No other request was started.
    assert not shared._has_work
    # Control: the engine is correct up to the last position.
    prompt = list(range(90))
    assert generate(shared, [prompt], max_tokens=10) == [naive(FAMILY, prompt, max_tokens=10)]


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'max_context': 101}, 'max_context=101: must be from 1 to 100, the context length of the model, or 0'),
        ({'max_context': -1}, 'max_context=-1'),
        ({'num_slots': 0}, 'num_slots=0: must be at least 1'),
        ({'max_queue_size': -1}, 'max_queue_size=-1: must be at least 0'),
        ({'chunk': 0}, 'chunk=0: must be at least 1'),
        ({'cache': 'fp4'}, 'cache=fp4: must be one of model, int8'),
    ],
)
def test_settings_out_of_range(settings, fragments):
    assert fragments in refusal(lambda: Engine(load(FAMILY), **settings))


def test_embeddings_are_means_of_the_last_hidden_states(fresh):
    # The longest prompt has several chunks. Its prefix is in another slot, and must not be skipped.
    generate(fresh, [PROMPTS[2][:40]], max_tokens=2)
    # A continuation runs at the same time.
    fresh.submit(Request((5, 6), 4, GREEDY), lambda delta: None)
    for prompt, delta in zip(PROMPTS, embed(fresh, PROMPTS), strict=True):
        assert (delta.embedding.dtype, delta.finish_reason, delta.tokens) == (np.float32, 'stop', ())
        np.testing.assert_allclose(delta.embedding, mean_hidden_state(FAMILY, prompt), atol=1e-4)
    # Control: the means differ between prompts.
    assert np.abs(mean_hidden_state(FAMILY, PROMPTS[1]) - mean_hidden_state(FAMILY, PROMPTS[2])).max() > 0.01
    assert fresh.state.generated_tokens == 6
    # The keys and values of an embedded prompt can be reused.
    before = fresh.state.cached_tokens
    assert generate(fresh, [PROMPTS[2]], max_tokens=4)[0] == naive(FAMILY, PROMPTS[2], max_tokens=4)
    assert fresh.state.cached_tokens == before + len(PROMPTS[2]) - 1


@pytest.mark.parametrize('is_limited', [True, False])
def test_long_prompts_do_not_stall_running_samples(is_limited, monkeypatch):
    """Between two tokens of a running sample, other prompts have one pass, of one chunk at most."""
    some = new_engine(load('gpt2'))
    if not is_limited:
        # Control: the first step prefills everything that fits into the free slots.
        monkeypatch.setattr(some._compiled, 'chunk_length', lambda num_tokens: min(num_tokens, 32))
        monkeypatch.setattr(some._compiled, 'chunk', 10_000)
    passes, lengths, stream, others = [], [], [], []
    prefill, decode = some._compiled.prefill, some._compiled.decode

    def counted_prefill(params, state, chunks, **settings):
        passes.append(sum(len(chunk.tokens) for chunk in chunks))
        return prefill(params, state, chunks, **settings)

    def counted_decode(params, state, num_tokens, *rows, **settings):
        if num_tokens[0]:
            lengths.append(passes.copy())
            passes.clear()
        return decode(params, state, num_tokens, *rows, **settings)

    monkeypatch.setattr(some._compiled, 'prefill', counted_prefill)
    monkeypatch.setattr(some._compiled, 'decode', counted_decode)
    some.submit(Request((7,), 60, GREEDY), lambda delta: stream.extend(token.id for token in delta.tokens))
    some.step()
    some.step()
    lengths.clear()
    # Three times the chunk, and not a multiple of it, so that the rest leaves space for a chunk of the next prompt.
    prompts = [[number, *range(20, 92)] for number in range(8)]
    for prompt in prompts:
        some.submit(Request(tuple(prompt), 1, GREEDY), others.append)
    while len(others) < len(prompts):
        some.step()
    while some.step():
        pass
    assert stream == naive('gpt2', [7], max_tokens=60)
    assert {delta.finish_reason for delta in others} == {'length'}
    most_tokens = max(map(sum, lengths))
    if is_limited:
        assert most_tokens <= 32
        assert max(map(len, lengths)) == 1
        # Each prompt has three passes, of which the last is short.
        assert sum(map(len, lengths)) <= 8 * 3
    else:
        assert most_tokens > 64
