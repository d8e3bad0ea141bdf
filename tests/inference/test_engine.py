"""Continuous batching against a loop that computes everything again for every token."""

import functools
import math
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.data.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.inference import passes, programs, slots
from maxlm.inference.engine import Engine
from maxlm.inference.load import LoadedModel
from maxlm.inference.pace import Pace
from maxlm.inference.requests import QueueFullError, Request
from maxlm.inference.sampling import Sampling
from maxlm.inference.slots import Slot
from maxlm.model import attention, linear
from maxlm.model import cache as model_cache
from maxlm.training.state import abstract_model, init_state
from tests.small import small_config, small_layout

GREEDY = Sampling(temperature=0)
NUM_IDS = 257
CONTEXT = 100
# Beyond one chunk of the prompt's length, and so long that padding reaches past the context.
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(40, 110))]
MAX_TOKENS = 12
# Spread far enough that rounding does not change which token is the likeliest.
MODEL = {'model__init_std': 0.4, 'model__dim': 16, 'model__vocab_size': 1024, 'model__max_positions': CONTEXT}
SCALED = {'model__family': 'llama', 'model__rotary_factor': 4.0, 'model__rotary_original_positions': 25}
FAMILIES = {
    'gpt2': {'model__family': 'gpt2'},
    'gpt_neox': {'model__family': 'gpt_neox', 'model__dim': 32},
    'llama, grouped': {'model__family': 'llama', 'model__num_kv_heads': 2},
    'qwen3': {'model__family': 'qwen3', 'model__num_kv_heads': 1},
    'nanochat': {'model__family': 'nanochat'},
    'linear': {**SCALED, 'model__rotary_scaling': 'linear'},
    'yarn': {**SCALED, 'model__rotary_scaling': 'yarn'},
    'llama3': {**SCALED, 'model__rotary_scaling': 'llama3'},
    # Within the original context: behind it keys stay as they were rotated, which one pass does otherwise.
    'dynamic': {**SCALED, 'model__rotary_scaling': 'dynamic', 'model__rotary_original_positions': CONTEXT},
    'windows': {
        'model__family': 'llama',
        'model__num_layers': 3,
        'model__sliding_window': 5,
        'model__attention_pattern': 'SLS',
    },
}


pytestmark = pytest.mark.usefixtures('turn')


@pytest.fixture(scope='module')
def turn():
    """Kernels of these small models are turned as those of larger ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, 'TURNED_INPUTS', 1)
        yield


@functools.cache
def load(family, num_devices=1, **mesh):
    settings = {f'mesh__{axis}': size for axis, size in mesh.items()}
    config = small_config(num_devices=num_devices, **{**MODEL, **FAMILIES[family]}, **settings)
    layout = small_layout(config)
    params = init_state(config, layout).params
    return LoadedModel(config, layout, params, bytes_tokenizer(), Path('tokenizer.json'), 1)


@functools.cache
def engine(family, **settings):
    return Engine(load(family), **{'num_slots': 3, **settings})


@functools.cache
def forward(family):
    """(params, tokens [1, T], index) → the logits behind the token at `index`, over all ids of the model."""
    model = load(family)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))

    @jax.jit
    def logits(params, tokens_1T, index):
        decoder = nnx.merge(graph, params)
        hidden_1TD, _ = decoder(tokens_1T)
        return decoder.logits(hidden_1TD)[0, index]

    return logits


def naive_logits(family, tokens, num_ids=NUM_IDS):
    # What stands behind a token does not matter to it, so one length serves all.
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(family)(load(family).params, jnp.asarray(padded), len(tokens) - 1))[:num_ids]


def naive(family, prompt, num_ids=NUM_IDS, max_tokens=MAX_TOKENS):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(np.argmax(naive_logits(family, tokens, num_ids))))
    return tokens[len(prompt) :]


def requests_of(prompts, sampling=GREEDY, max_tokens=MAX_TOKENS, **settings):
    return [Request(tuple(prompt), max_tokens, sampling, **settings) for prompt in prompts]


def generate(engine, prompts, **settings):
    return [samples[0].ids for samples in engine.complete(requests_of(prompts, **settings))]


@pytest.mark.parametrize('family', FAMILIES)
def test_cached_equals_uncached(family):
    expected = [naive(family, prompt) for prompt in PROMPTS]
    # Rings of 64 slots where layers have a window, which the longest text does not fit into.
    assert generate(engine(family, chunk=16), PROMPTS) == expected
    # Control: prompts matter, and the model does not just repeat one token.
    assert len({tuple(row) for row in expected}) == len(PROMPTS)
    assert all(len(set(row)) > 1 for row in expected)


def test_layers_in_a_loop_give_the_same(monkeypatch):
    """As they run on GPUs and TPUs."""
    # Made before, whatever ran until now.
    made = engine('windows', chunk=16)
    assert isinstance(made._state.caches, list)
    kernel_LFD = load('windows').params['blocks']['feedforward']['down']['kernel']
    assert kernel_LFD.shape[1] != kernel_LFD.shape[2]
    layers = [layer['feedforward']['down']['kernel'] for layer in made._params['blocks']]
    np.testing.assert_array_equal(layers, kernel_LFD.swapaxes(1, 2))
    np.testing.assert_array_equal(made._params['head']['kernel'], load('windows').params['head']['kernel'].T)
    monkeypatch.setattr(passes, 'layers_apart', lambda config: False)
    looped = Engine(load('windows'), num_slots=8, chunk=16)
    assert isinstance(looped._state.caches, dict)
    # Other compilers choose themselves how kernels lie.
    np.testing.assert_array_equal(looped._params['blocks']['feedforward']['down']['kernel'], kernel_LFD)
    assert generate(looped, PROMPTS) == [naive('windows', prompt) for prompt in PROMPTS]


@pytest.mark.parametrize('cache', ['model', 'int8'])
@pytest.mark.parametrize('family', ['llama, grouped', 'windows'])
def test_slots_in_use_are_read_in_parts(family, cache, monkeypatch):
    expected = generate(engine(family, chunk=16, cache=cache), PROMPTS)
    monkeypatch.setattr(model_cache, 'SMALLEST_PART', 16)
    some = Engine(load(family), num_slots=3, chunk=16, cache=cache)
    # The layers that see all, and rings.
    found = {tuple(part.num_slots for part in parts) for parts in some._state.caches}
    assert found == {(16, 16, 32, 36), *([(16, 16, 32)] if family == 'windows' else [])}
    assert generate(some, PROMPTS) == expected
    # Control: the last slots that are in use matter.
    monkeypatch.setattr(attention, 'attend_cached', fewer_slots)
    assert generate(Engine(load(family), num_slots=3, chunk=16, cache=cache), PROMPTS) != expected


ATTEND_CACHED = attention.attend_cached


def fewer_slots(q_BTNH, cache, places, mask_BTS):
    return ATTEND_CACHED(q_BTNH, cache, places._replace(end=jnp.maximum(places.end - 32, 0)), mask_BTS)


@pytest.mark.parametrize('cache', ['model', 'int8'])
def test_caches_have_room_for_what_is_in_them(cache, monkeypatch):
    """As on GPUs and TPUs, where every pass reads all of them."""
    family = 'windows'
    expected = generate(engine(family, chunk=16, cache=cache), PROMPTS, max_tokens=25)
    monkeypatch.setattr(passes, 'layers_apart', lambda config: False)
    monkeypatch.setattr(programs, 'SMALLEST_ROOM', 24)
    monkeypatch.setattr(slots, 'SPARE_PASSES', 30)
    some = Engine(load(family), num_slots=3, chunk=16, cache=cache)

    def room():
        return some._state.caches[0].num_slots

    assert some._programs.rooms == [24, 96, 100]
    assert room() == 24
    assert generate(some, PROMPTS[:2], max_tokens=12) == [row[:12] for row in expected[:2]]
    assert room() == 24
    # The second prompt grows out of its room with what it has.
    assert generate(some, PROMPTS[1:2], max_tokens=25) == expected[1:2]
    assert room() == 96
    assert some._state.caches[5].num_slots == 64
    assert generate(some, PROMPTS, max_tokens=25) == expected
    # What was not needed for long is given up, with what idle slots have there.
    assert max(len(slot.content) for slot in some._slots) == 70 + 24
    assert generate(some, PROMPTS[:1] * 3, max_tokens=20) == [expected[0][:20]] * 3
    assert room() == 96
    assert generate(some, PROMPTS[:1], max_tokens=20) == [expected[0][:20]]
    assert room() == 24
    assert max(len(slot.content) for slot in some._slots) <= 24
    assert generate(some, PROMPTS, max_tokens=25) == expected
    # Control: without room tokens are lost.
    monkeypatch.setattr(slots.Room, 'fit', lambda self, length, passes=0: 24)
    some = Engine(load(family), num_slots=3, chunk=16, cache=cache)
    assert generate(some, PROMPTS, max_tokens=25) != expected


def test_the_number_of_tokens_of_a_call_does_not_matter(monkeypatch):
    """Nor does it count where a text ends."""
    family, warm = 'llama, grouped', {'sampling': Sampling(temperature=2.0), 'seed': 5, 'max_tokens': 25}
    expected = generate(engine(family), PROMPTS), generate(engine(family), PROMPTS, **warm)
    rng = np.random.default_rng(0)
    for draw in (lambda left: 1, lambda left: 8, lambda left: int(rng.integers(1, 9))):
        monkeypatch.setattr(Pace, 'passes', lambda self, left, is_next, draw=draw: min(draw(left), max(left)))
        some = Engine(load(family), num_slots=3)
        assert (generate(some, PROMPTS), generate(some, PROMPTS, **warm)) == expected
        # A sample that ends within a call: what is behind is not told, and its slot serves the next.
        some._ends = frozenset({expected[1][1][9]})
        ended = some.complete(requests_of(PROMPTS, **warm))
        assert ended[1][0].ids == expected[1][1][: expected[1][1].index(expected[1][1][9])]
        assert ended[1][0].finish == 'stop'
        some._ends = frozenset()
        assert generate(some, PROMPTS) == expected[0]


def test_rings_are_smaller_and_go_round():
    ring, whole = (Engine(load('windows'), num_slots=1, chunk=chunk) for chunk in (16, 100))
    assert ring._programs.ring_slots() == {5: 64}
    assert whole._programs.ring_slots() == {}
    assert ring.cache_bytes < 0.8 * whole.cache_bytes
    prompt = PROMPTS[1]
    expected = naive('windows', prompt, max_tokens=90)
    assert generate(ring, [prompt], max_tokens=90) == [expected]
    # A slot that went round does not have what a prompt that begins in the same way needs.
    again = [*prompt, *expected[:20]]
    before = ring.state.shared_tokens
    assert generate(ring, [again], max_tokens=5) == [expected[20:25]]
    assert ring.state.shared_tokens == before


def test_requests_that_come_and_go_are_as_if_alone():
    family = 'llama, grouped'
    rng = np.random.default_rng(0)
    lengths, wanted = rng.integers(1, 60, 64), rng.integers(1, 30, 64)
    prompts = [rng.integers(0, NUM_IDS, length).tolist() for length in lengths]
    # Some begin as others do.
    for number in range(0, 64, 4):
        shared = int(min(lengths[number], 30))
        prompts[number][:shared] = prompts[0][:shared] + prompts[number][len(prompts[0][:shared]) : shared]
    requests = [Request(tuple(p), int(n), GREEDY) for p, n in zip(prompts, wanted, strict=True)]
    found = {}

    def listen(number):
        def listener(delta):
            assert delta.sample == 0
            found.setdefault(number, []).append(delta)

        return listener

    busy = engine(family)
    waiting = list(enumerate(requests))
    while waiting or busy._busy:
        for _ in range(rng.integers(0, 4)):
            if waiting:
                number, request = waiting.pop(0)
                busy.submit(request, listen(number))
        busy.step()
    alone = engine(family, num_slots=1)
    together = [[token.id for delta in found[number] for token in delta.tokens] for number in range(64)]
    assert together == [alone.complete([request])[0][0].ids for request in requests]
    assert together[5] == naive(family, prompts[5], max_tokens=int(wanted[5]))
    assert [deltas[-1].finish for deltas in (found[n] for n in range(64))] == ['length'] * 64
    assert busy.state.shared_tokens > 0
    # Many were served by one pass.
    assert busy.state.passes < sum(wanted) / 2


def test_shared_prefixes_are_computed_once(monkeypatch):
    family = 'llama, grouped'
    some = Engine(load(family), num_slots=3)
    prompt = PROMPTS[2]
    first = generate(some, [prompt])[0]
    assert some.state.shared_tokens == 0
    # What follows the answer of before, as a conversation does, takes over all but the last token.
    longer = [*prompt, *first[:-1], 5, 6]
    assert generate(some, [longer], max_tokens=4)[0] == naive(family, longer, max_tokens=4)
    assert some.state.shared_tokens == len(prompt) + len(first) - 1
    # Another branch from the beginning, while the first is still needed by nobody.
    branch = [*prompt[:40], 1, 2, 3]
    assert generate(some, [branch], max_tokens=4)[0] == naive(family, branch, max_tokens=4)
    assert some.state.shared_tokens == len(prompt) + len(first) - 1 + 40
    # Control: a slot that says that it has more than it has gives another text.
    monkeypatch.setattr(Slot, 'holds', lambda self, prompt: min(len(prompt), len(self.content)))
    other = [9] * 50
    assert generate(some, [other], max_tokens=4)[0] != naive(family, other, max_tokens=4)


def test_samples_of_a_prompt_share_it_and_differ():
    some = Engine(load('llama, grouped'), num_slots=3)
    request = Request(tuple(PROMPTS[2]), MAX_TOKENS, Sampling(temperature=3.0), seed=4, num_samples=5)
    rows = [sample.ids for sample in some.complete([request])[0]]
    assert len({tuple(row) for row in rows}) == 5
    assert some.state.shared_tokens == 4 * (len(PROMPTS[2]) - 1)


def test_the_seed_decides():
    some = engine('gpt2')
    warm = {'sampling': Sampling(temperature=3.0), 'num_samples': 2}

    def draw(seed, prompts=PROMPTS, **settings):
        rows = some.complete(requests_of(prompts, seed=seed, **warm, **settings))
        return [[sample.ids for sample in samples] for samples in rows]

    first = draw(0)
    assert draw(0) == first
    # Neither batch mates nor the number of tokens matter.
    assert draw(0, prompts=PROMPTS[1:2]) == first[1:2]
    assert draw(0, max_tokens=5) == [[row[:5] for row in rows] for rows in first]
    other = draw(1)
    assert all(a != b for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True))
    assert max(max(row) for rows in first + other for row in rows) < NUM_IDS


def test_ids_that_the_tokenizer_does_not_have_never_come():
    assert max(max(row) for row in generate(engine('llama, grouped'), PROMPTS)) < NUM_IDS
    # Control: the model would like to.
    assert max(naive('llama, grouped', PROMPTS[1], num_ids=1024)) >= NUM_IDS


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def test_log_probabilities():
    family = 'gpt2'
    sampling = Sampling(temperature=2.0, top_k=5)
    requests = [
        Request(tuple(PROMPTS[1]), 6, sampling, top_log_probs=3),
        Request(tuple(PROMPTS[1]), 6, sampling, top_log_probs=0),
        Request(tuple(PROMPTS[1]), 6, sampling),
    ]
    (told,), (chosen,), (none,) = engine(family).complete(requests)
    assert told.ids == chosen.ids == none.ids
    text = list(PROMPTS[1])
    for token, other in zip(told.tokens, chosen.tokens, strict=True):
        expected = log_softmax(naive_logits(family, text))
        likeliest = np.argsort(-expected)[:3]
        assert [i for i, _ in token.top] == likeliest.tolist()
        np.testing.assert_allclose([value for _, value in token.top], expected[likeliest], atol=1e-4)
        np.testing.assert_allclose([token.log_prob, other.log_prob], expected[token.id], atol=1e-4)
        assert other.top == ()
        text.append(token.id)
    assert all(math.isnan(token.log_prob) for token in none.tokens)
    # Control: of the temperature that they are drawn at, they are others.
    assert abs(told.tokens[0].log_prob - log_softmax(naive_logits(family, PROMPTS[1]) / 2)[told.ids[0]]) > 1e-2


def test_penalties():
    family, prompt = 'gpt2', PROMPTS[1]
    sampling = Sampling(temperature=0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
    tokens: list[int] = []
    for _ in range(20):
        logits = naive_logits(family, [*prompt, *tokens]).copy()
        for token in set(prompt) | set(tokens):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in set(tokens):
            logits[token] -= 0.7 + 0.4 * tokens.count(token)
        tokens.append(int(np.argmax(logits)))
    assert generate(engine(family), [prompt], sampling=sampling, max_tokens=20) == [tokens]
    # Control: it is not what comes without, and a slot forgets the penalties of the one before.
    plain = generate(engine(family), [prompt], max_tokens=20)
    assert plain == [naive(family, prompt, max_tokens=20)] != [tokens]


def test_int8_halves_the_cache_and_changes_little():
    family = 'llama, grouped'
    small, exact = engine(family, cache='int8'), engine(family)
    # float32 here, and a head of four has one scale of four bytes.
    assert small.cache_bytes == exact.cache_bytes // 2
    request = Request(tuple(PROMPTS[2]), 1, GREEDY, top_log_probs=5)
    request_long = Request(tuple([*PROMPTS[2], 3, 4, 5]), 1, GREEDY, top_log_probs=5)
    for one in (request, request_long):
        ((found,),), ((expected,),) = small.complete([one]), exact.complete([one])
        got, want = dict(found.tokens[0].top), dict(expected.tokens[0].top)
        common = got.keys() & want.keys()
        assert len(common) >= 4
        differences = [abs(got[i] - want[i]) for i in common]
        assert 0 < max(differences) < 0.3


def with_end(family, end, chat=None):
    """The engine for a tokenizer whose end of document is `end`."""
    library = bytes_tokenizer()
    tokenizer = types.SimpleNamespace(vocab_size=NUM_IDS, end_of_document=end, decode=library.decode)
    return Engine(load(family)._replace(tokenizer=tokenizer, chat=chat), num_slots=3)


def test_a_text_stops_at_its_end():
    family = 'llama, grouped'
    rows = generate(engine(family), PROMPTS)
    # The end of a document comes in one row, that of a turn in another.
    end, end_of_turn = rows[0][6], rows[1][3]
    chat = types.SimpleNamespace(end_of_turn=end_of_turn)
    ending = with_end(family, end, chat)
    completions = [samples[0] for samples in ending.complete(requests_of(PROMPTS))]
    for completion, whole in zip(completions, rows, strict=True):
        stop = min(whole.index(one) if one in whole else len(whole) for one in (end, end_of_turn))
        assert completion.ids == whole[:stop]
        assert completion.finish == ('length' if stop == MAX_TOKENS else 'stop')
    assert {completion.finish for completion in completions} == {'stop', 'length'}
    # Control: unless it is to go on.
    assert generate(ending, PROMPTS, ignore_ends=True) == rows
    # A document that ends at once.
    assert generate(with_end(family, rows[0][0]), PROMPTS[:1]) == [[]]


def test_a_text_stops_at_stop_strings():
    family = 'llama, grouped'
    request = Request(tuple(PROMPTS[1]), 40, GREEDY)
    ((whole,),) = engine(family).complete([request])
    decoded = bytes_tokenizer().decode(whole.ids)
    assert whole.text == decoded
    stop = decoded[10:12]
    ((cut,),) = engine(family).complete([Request(tuple(PROMPTS[1]), 40, GREEDY, stops=('not there', stop))])
    assert (cut.text, cut.finish) == (decoded[: decoded.index(stop)], 'stop')
    assert len(cut.ids) < 40


def test_devices_share_the_work(monkeypatch):
    monkeypatch.setattr(model_cache, 'SMALLEST_PART', 32)
    family = 'llama, grouped'
    expected = [naive(family, prompt) for prompt in PROMPTS]
    # Rows and heads that a device has of 4 slots and 2 heads.
    for mesh, part in (({'data': 2, 'tensor': 2}, (2, 1)), ({'fsdp': 2}, (2, 2))):
        some = Engine(load(family, math.prod(mesh.values()), **mesh), num_slots=3)
        assert generate(some, PROMPTS) == expected, mesh
        keys = [cache.key_LBKSH for cache in some._state.caches[0]]
        assert [x.addressable_shards[0].data.shape[1:3] for x in keys] == [part] * 3
    with pytest.raises(InputError, match=r'mesh\.context=2: there is no cache'):
        Engine(load(family, 2, context=2))


def test_everything_is_compiled_before_it_is_needed():
    some = Engine(load('gpt2'), num_slots=3, chunk=40)
    names = []
    some.warm_up(names.append)
    assert names == ['take over 100', 'decode 1 × 100', 'decode 3 × 100', 'prefill 32 of 100', 'prefill 40 of 100']
    sizes = some._programs._prefill._cache_size(), some._programs._decode._cache_size()
    assert sizes == (2, 2)
    assert generate(some, PROMPTS) == [naive('gpt2', prompt) for prompt in PROMPTS]
    some.complete(requests_of(PROMPTS, Sampling(top_p=0.5, min_p=0.1), top_log_probs=5))
    assert (some._programs._prefill._cache_size(), some._programs._decode._cache_size()) == sizes


def test_cancelled_samples_free_their_slots():
    some = engine('gpt2')
    deltas = {name: [] for name in ('running', 'waiting', 'other')}
    request = Request(tuple(PROMPTS[1]), 80, GREEDY, num_samples=3)
    running = some.submit(request, deltas['running'].append)
    waiting = some.submit(request, deltas['waiting'].append)
    some.submit(Request((1,), 3, GREEDY), deltas['other'].append)
    for _ in range(5):
        some.step()
    assert (some.state.running, some.state.waiting) == (3, 4)
    running.cancel()
    waiting.cancel()
    some.step()
    assert [delta.finish for delta in deltas['running'] if delta.finish] == ['cancelled'] * 3
    assert [delta.finish for delta in deltas['waiting'] if delta.finish] == ['cancelled'] * 3
    assert some.state.running == 1
    while some.step():
        pass
    assert [token.id for delta in deltas['other'] for token in delta.tokens] == naive('gpt2', [1], max_tokens=3)
    # What has ended stays as it is.
    running.cancel()
    some.step()
    assert len([delta for delta in deltas['running'] if delta.finish]) == 3


def test_the_queue_has_an_end():
    some = Engine(load('gpt2'), num_slots=2, max_waiting=2)
    request = Request((1,), 2, GREEDY)
    for _ in range(4):
        some.submit(request, lambda delta: None)
    with pytest.raises(QueueFullError, match='4 samples wait already'):
        some.submit(request, lambda delta: None)
    while some.step():
        pass
    some.submit(request, lambda delta: None)
    deltas = []
    some.submit(Request((1,), 2, GREEDY, num_samples=3), deltas.append)
    some.fail()
    assert [delta.finish for delta in deltas] == ['failed'] * 3


def test_who_waits_is_woken():
    some = engine('gpt2')
    woken = threading.Event()

    def wait():
        some.wait(60)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    some.submit(Request((1,), 1, GREEDY), lambda delta: None)
    assert woken.wait(30)
    thread.join()
    while some.step():
        pass


def refusal(call):
    with pytest.raises(InputError) as info:
        call()
    assert '\n' not in str(info.value)
    return str(info.value)


def test_what_does_not_fit_is_refused():
    some = engine('gpt2')

    def check(prompt, max_tokens):
        return refusal(lambda: some.complete([Request((1,), 3, GREEDY), Request(tuple(prompt), max_tokens, GREEDY)]))

    message = check([2] * 90, 11)
    assert message.startswith('max_tokens=11: the prompt has 90 tokens and the context of the model 100; at most 10')
    assert 'at most 0 tokens' in check([1] * 101, 1)
    assert 'ids outside of 0 … 256' in check([257], 1)
    assert 'ids outside of 0 … 256' in check([-1], 1)
    # Nothing of the others was done.
    assert not some._busy
    # Control: up to the last position it works, and is right.
    prompt = list(range(90))
    assert generate(some, [prompt], max_tokens=10) == [naive('gpt2', prompt, max_tokens=10)]


@pytest.mark.parametrize(
    ('settings', 'words'),
    [
        ({'max_context': 101}, 'max_context=101: must be from 1 to 100, the context of the model; 0'),
        ({'max_context': -1}, 'max_context=-1'),
        ({'num_slots': 0}, 'num_slots=0: must be at least 1'),
        ({'max_waiting': -1}, 'max_waiting=-1: must be at least 0'),
        ({'chunk': 0}, 'chunk=0: must be at least 1'),
        ({'cache': 'fp4'}, 'cache=fp4: must be one of model, int8'),
    ],
)
def test_settings_out_of_range(settings, words):
    assert words in refusal(lambda: Engine(load('gpt2'), **settings))
