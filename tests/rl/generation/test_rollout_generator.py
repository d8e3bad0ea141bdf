"""Tests the rollout generator against the engine, the training forward pass and the softmax, on several meshes."""

import functools
import json
import math
import types
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from maxlm.errors import InputError
from maxlm.inference.engine.requests import Request
from maxlm.inference.load import LoadedModel
from maxlm.inference.sampling import Sampling
from maxlm.rl.generation.rollout_generator import Sampler
from maxlm.rl.generation.rollout_shape import plan_runs
from maxlm.training.state import abstract_model
from tests.inference.engines import new_engine
from tests.parameters import random_params
from tests.processes import Processes
from tests.rl.rollout_pair import MAX_PROMPT, MAX_TOKENS, NUM_SAMPLES, PROMPTS, SETTINGS, STD
from tests.small import EXPERTS, LATENT, STREAM, small_config, small_layout

VOCAB = SETTINGS['model__vocab_size']
FAMILIES = {
    'gpt2': {},
    'gpt_neox, adapters': {'model__num_kv_heads': 2, 'model__lora_rank': 2},
    'nanochat': {},
    'llama': {'model__num_kv_heads': 2},
    'qwen3, yarn, windows': {
        'model__num_kv_heads': 1,
        'model__head_dim': 12,
        'model__attention_pattern': 'SL',
        'model__sliding_window': 3,
        'model__rope_scaling': 'yarn',
        'model__rope_scaling_factor': 4.0,
    },
    'llama, stream': STREAM,
    'llama, experts': EXPERTS,
    'llama, dynamic': {'model__rope_scaling': 'dynamic', 'model__rope_scaling_factor': 2.0},
    'llama, latents, adapters': {
        **{key: value for key, value in LATENT.items() if key != 'model__family'},
        'model__lora_rank': 2,
    },
    'llama, bfloat16': {'model__dtype': 'bfloat16'},
}
# Dynamic scaling is left out: keys in a cache keep their first rotation, while one pass rotates all keys again.
OTHERS = [
    pytest.param(name, marks=pytest.mark.nightly) if 'bfloat16' in name else name
    for name in FAMILIES
    if name not in ('llama', 'llama, dynamic')
]
ROWS = [prompt for prompt in PROMPTS for _ in range(NUM_SAMPLES)]


class Model(NamedTuple):
    config: object
    layout: object
    params: object


@functools.cache
def make(name='llama', std=STD, num_devices=1, **mesh):
    """Returns a model with random parameters, which are the same on every mesh."""
    given = {f'mesh__{axis}': size for axis, size in mesh.items()}
    config = small_config(num_devices, **{**SETTINGS, **FAMILIES[name], 'model__family': name.split(',')[0], **given})
    layout = small_layout(config)
    return Model(config, layout, random_params(config, layout, std=std))


@functools.cache
def sampler(model_name='llama', ends=()):
    model = make(model_name)
    return Sampler(model.config, model.layout, ends=ends, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS)


def draw(name='llama', prompts=PROMPTS, *, ends=(), seed=0, num_samples=NUM_SAMPLES, **kwargs):
    return sampler(name, ends)(make(name).params, prompts, seed=seed, num_samples=num_samples, **kwargs)


@functools.cache
def forward(name):
    """Returns a function for the log-probabilities of all ids after each token, by the training pass without cache."""
    model = make(name)
    graph, _ = nnx.split(abstract_model(model.config, model.layout))

    @jax.jit
    def log_softmax(params, tokens_BT, segments_BT, positions_BT):
        decoder = nnx.merge(graph, params)
        hidden_BTD, _, _ = decoder(tokens_BT, segments_BT=segments_BT, positions_BT=positions_BT)
        return jax.nn.log_softmax(decoder.logits(hidden_BTD))

    return log_softmax


def in_training(name, windows, *, isolated=True, params=None):
    """Returns log-probabilities of all ids after each token of every text. A window packs several texts."""
    T = 2 * (MAX_PROMPT + MAX_TOKENS)
    tokens, segments, positions = np.zeros((3, len(ROWS), T), np.int32)
    places = []
    for row, texts in enumerate(windows):
        start = 0
        for number, text in enumerate(texts, start=1):
            part = slice(start, start + len(text))
            tokens[row, part], segments[row, part], positions[row, part] = text, number, np.arange(len(text))
            places.append((row, part))
            start = part.stop
    given = (tokens, segments if isolated else np.ones_like(segments), positions)
    found = np.asarray(forward(name)(make(name).params if params is None else params, *given))
    return [found[row, part] for row, part in places]


def texts_of(responses):
    return [prompt + row.tolist() for prompt, row in zip(ROWS, responses.tokens_BR, strict=True)]


class Compared(NamedTuple):
    """Responses at temperatures 1 and 0, and the log-probabilities of a training pass over each."""

    name: str
    sampled: object
    greedy: object
    of_sampled: list
    of_greedy: list

    @property
    def tolerance(self):
        return 0.2 if 'bfloat16' in self.name else 1e-4


def compare(name):
    sampled, greedy = (draw(name, temperature=temperature) for temperature in (1.0, 0.0))
    return Compared(
        name, sampled, greedy, *(in_training(name, [[text] for text in texts_of(row)]) for row in (sampled, greedy))
    )


@pytest.fixture(scope='module')
def llama():
    return compare('llama')


def error_of_log_probs(responses, found, shift=0):
    errors = []
    for prompt, text, logs, drawn in zip(ROWS, texts_of(responses), found, responses.log_probs_BR, strict=True):
        own = logs[np.arange(len(text) - 1), text[1:]][len(prompt) - 1 :]
        errors.append(np.abs(own[shift:] - drawn[: MAX_TOKENS - shift]).max())
    return max(errors)


def assert_log_probabilities_equal_training(compared):
    assert error_of_log_probs(compared.sampled, compared.of_sampled) < compared.tolerance
    # Control: positions shifted by one.
    assert error_of_log_probs(compared.sampled, compared.of_sampled, shift=1) > 0.5


def assert_log_probabilities_equal_packed_texts(compared):
    texts = texts_of(compared.sampled)
    windows = [texts[:2], texts[2:4], texts[4:]]
    assert error_of_log_probs(compared.sampled, in_training(compared.name, windows)) < compared.tolerance
    # Control: texts that attend to each other.
    assert error_of_log_probs(compared.sampled, in_training(compared.name, windows, isolated=False)) > 0.5


def assert_tokens_at_temperature_0_are_greedy(compared):
    for prompt, row, logs in zip(ROWS, compared.greedy.tokens_BR, compared.of_greedy, strict=True):
        np.testing.assert_array_equal(logs.argmax(-1)[len(prompt) - 1 : -1], row)
    # Control: responses at the two temperatures differ.
    assert not np.array_equal(compared.sampled.tokens_BR, compared.greedy.tokens_BR)


def test_log_probabilities_equal_training(llama):
    assert_log_probabilities_equal_training(llama)


def test_log_probabilities_equal_packed_texts(llama):
    assert_log_probabilities_equal_packed_texts(llama)


def test_tokens_at_temperature_0_are_greedy(llama):
    assert_tokens_at_temperature_0_are_greedy(llama)


@pytest.mark.parametrize('name', OTHERS)
def test_every_family_equals_training(name):
    compared = compare(name)
    assert_log_probabilities_equal_training(compared)
    assert_log_probabilities_equal_packed_texts(compared)
    if 'bfloat16' not in name:
        assert_tokens_at_temperature_0_are_greedy(compared)


def test_tokens_equal_those_of_the_engine():
    name = 'llama, dynamic'
    model = make(name)
    boundaries = types.SimpleNamespace(stops=())
    tokenizer = types.SimpleNamespace(vocab_size=VOCAB, boundaries=boundaries, decode=lambda ids: '')
    loaded = LoadedModel(model.config, model.layout, model.params, tokenizer, Path('tokenizer.json'), 1)
    engine = new_engine(loaded, num_slots=4, all_rows=True)
    for temperature in (0.0, 1.0):
        found = draw(name, seed=3, temperature=temperature).tokens_BR
        for number, prompt in enumerate(PROMPTS):
            # Rows are numbered through all prompts; samples of a request are numbered from 0.
            rows = slice(number * NUM_SAMPLES, (number + 1) * NUM_SAMPLES)
            request = Request(tuple(prompt), MAX_TOKENS, Sampling(temperature=temperature), 3, rows.stop)
            (samples,) = engine.complete([request])
            assert [sample.ids for sample in samples[rows]] == found[rows].tolist()
    # Controls: the seed and the prompt change the result.
    assert draw(name).tokens_BR.tolist() != found.tolist()
    assert len(np.unique(draw(name, temperature=0.0).tokens_BR, axis=0)) == len(PROMPTS)


def test_tokens_are_sampled_from_the_softmax(llama):
    num, model = 4096, make(std=0.15)
    sampler = Sampler(model.config, model.layout, ends=(), max_prompt=MAX_PROMPT, max_tokens=1)
    prompt = PROMPTS[1]
    log_probs = in_training('llama', [[prompt]], params=model.params)[0][-1]

    def chi_square(**kwargs):
        responses = sampler(model.params, [prompt], seed=0, num_samples=num, **kwargs)
        tokens = responses.tokens_BR[:, 0]
        probabilities = np.exp(log_probs)
        np.testing.assert_allclose(responses.log_probs_BR[:, 0], log_probs[tokens], atol=1e-4)
        expected = num * probabilities
        return (np.square(np.bincount(tokens, minlength=VOCAB) - expected) / expected).sum()

    assert np.ptp(log_probs) > 2
    assert num * np.exp(log_probs.min()) > 3
    # The bound is the mean plus five standard deviations of chi-square with VOCAB - 1 degrees of freedom.
    bound = VOCAB - 1 + 5 * np.sqrt(2 * (VOCAB - 1))
    assert chi_square() < bound
    # Control: another temperature samples from another distribution. Log-probabilities stay those of the model.
    assert chi_square(temperature=1.3) > bound


@pytest.mark.parametrize(
    ('mesh', 'gather_once'),
    [
        ({'data': 2, 'fsdp': 2, 'tensor': 2}, True),
        ({'fsdp': 2, 'tensor': 2, 'offload': 'all'}, False),
        pytest.param({'fsdp': 2, 'tensor': 2}, False, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_mesh_samples_the_same(mesh, gather_once, llama):
    num_devices = math.prod(size for size in mesh.values() if isinstance(size, int))
    alone, model = llama.sampled, make(num_devices=num_devices, **mesh)
    sampler_on_mesh = Sampler(
        model.config,
        model.layout,
        ends=(),
        max_prompt=MAX_PROMPT,
        max_tokens=MAX_TOKENS,
        gather_once=gather_once,
    )
    responses = sampler_on_mesh(model.params, PROMPTS, seed=0, num_samples=NUM_SAMPLES)
    np.testing.assert_array_equal(responses.tokens_BR, alone.tokens_BR)
    np.testing.assert_allclose(responses.log_probs_BR, alone.log_probs_BR, atol=1e-5)
    np.testing.assert_array_equal(responses.num_B, alone.num_B)


@pytest.mark.multiprocess
def test_two_processes_sample_the_same_and_have_all(tmp_path):
    with Processes(2, 1, [], logs=tmp_path / 'logs', module='tests.rl.rollout_pair') as processes:
        assert processes.wait() == [0, 0], processes.output(0) + processes.output(1)
        first, second = (json.loads(process.stdout.splitlines()[-1]) for process in processes.all)
    assert first == second
    alone = draw('gpt2')
    assert first['tokens'] == alone.tokens_BR.tolist()
    np.testing.assert_allclose(first['log_probs'], alone.log_probs_BR, atol=1e-5)


def test_other_rows_of_the_batch_do_not_matter(llama):
    together = llama.sampled
    # Results of the same compiled shape are identical bit by bit.
    others = draw(prompts=[PROMPTS[2], PROMPTS[1], [60]])
    own = slice(NUM_SAMPLES, 2 * NUM_SAMPLES)
    np.testing.assert_array_equal(others.tokens_BR[own], together.tokens_BR[own])
    np.testing.assert_array_equal(others.log_probs_BR[own], together.log_probs_BR[own])
    assert not np.array_equal(others.tokens_BR[:NUM_SAMPLES], together.tokens_BR[:NUM_SAMPLES])


def test_the_number_of_rows_at_a_time_does_not_matter(llama):
    """Processing one row at a time, or one prompt alone, changes results only by rounding."""
    together, own = llama.sampled, slice(NUM_SAMPLES, 2 * NUM_SAMPLES)
    parts = draw(rows_per_run=1)
    np.testing.assert_array_equal(parts.tokens_BR, together.tokens_BR)
    np.testing.assert_allclose(parts.log_probs_BR, together.log_probs_BR, atol=1e-5)
    assert parts.drawn == together.drawn == len(PROMPTS) * NUM_SAMPLES * MAX_TOKENS
    assert parts.passes == len(PROMPTS) * NUM_SAMPLES * (MAX_TOKENS - 1)
    alone = draw(prompts=PROMPTS[1:2], first_row=NUM_SAMPLES, rows_per_run=1)
    np.testing.assert_array_equal(alone.tokens_BR, together.tokens_BR[own])
    # Control: the row number changes the samples.
    assert not np.array_equal(draw(prompts=PROMPTS[1:2], rows_per_run=1).tokens_BR, alone.tokens_BR)


def test_the_loop_ends_with_the_last_response(llama):
    free = llama.greedy
    first = free.tokens_BR[0].tolist()
    end = first[2]
    assert free.passes == MAX_TOKENS - 1
    assert not free.ended_B.any()
    # An end id that never occurs has no effect.
    never = next(id for id in range(VOCAB) if id not in free.tokens_BR)
    ended = draw(ends=(never, end), temperature=0.0)
    for row, tokens in enumerate(free.tokens_BR.tolist()):
        num = tokens.index(end) + 1 if end in tokens else MAX_TOKENS
        assert ended.num_B[row] == num
        assert ended.ended_B[row] == (end in tokens)
        assert ended.tokens_BR[row].tolist() == tokens[:num] + [0] * (MAX_TOKENS - num)
        np.testing.assert_array_equal(ended.log_probs_BR[row, :num], free.log_probs_BR[row, :num])
        assert np.all(ended.log_probs_BR[row, num:] == 0)
    assert ended.drawn == ended.num_B.sum() < free.drawn
    # Control: at least one row does not end early.
    assert ended.passes == ended.num_B.max() - 1 == MAX_TOKENS - 1
    # If all rows end, no further pass follows.
    alike = draw(prompts=[PROMPTS[0]] * len(PROMPTS), ends=(never, end), temperature=0.0)
    assert alike.passes == first.index(end) == alike.num_B[0] - 1 < MAX_TOKENS - 1


def test_runs_respect_their_limit_and_divide_over_devices():
    lengths = (8, 8)
    assert plan_runs(8, 4, 0, shards=4, lengths=lengths) == (4, 8)
    # One prompt on eight devices: each device generates some of its samples.
    assert plan_runs(1, 16, 0, shards=8, lengths=lengths) == (2, 8)
    assert plan_runs(3, 2, 4, shards=1, lengths=lengths) == (2, 2)
    assert plan_runs(3, 4, 2, shards=2, lengths=lengths) == (1, 2)
    # Runs have about equal numbers of rows.
    assert plan_runs(10, 1, 8, shards=1, lengths=lengths) == (1, 5)
    for prompts in range(1, 8):
        for samples in (1, 2, 6):
            for rows in (0, 4, 9, 100):
                group, P = plan_runs(prompts, samples, rows, shards=4, lengths=lengths)
                assert samples % group == 0
                assert P % 4 == 0
                assert not rows or P * group <= rows


def refusal(act):
    with pytest.raises(InputError) as info:
        act()
    assert '\n' not in str(info.value)
    return str(info.value)


def test_requests_that_do_not_fit_are_refused(llama):
    model = make()

    def build(config=model.config, layout=model.layout, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS):
        return Sampler(config, layout, ends=(), max_prompt=max_prompt, max_tokens=max_tokens)

    for axis in ('stage', 'context'):
        micro_batch = {'train__per_device_batch_size': 1} if axis == 'stage' else {}
        config = small_config(2, **SETTINGS, **{f'mesh__{axis}': 2}, **micro_batch)
        assert f'mesh.{axis}=2: rollouts' in refusal(functools.partial(build, config, small_layout(config)))
    context = model.config.model.max_positions
    message = refusal(lambda: build(max_prompt=context - 3, max_tokens=4))
    assert (
        f'max_tokens=4: prompts have up to {context - 3} tokens and the context length of the model is {context}'
        in message
    )
    assert '3 tokens remain' in message
    assert 'max_tokens=0: must be at least 1' in refusal(lambda: build(max_tokens=0))
    assert 'max_prompt=0: must be at least 1' in refusal(lambda: build(max_prompt=0))
    assert 'no prompts found' in refusal(lambda: draw(prompts=[]))
    assert 'prompt 1 (counting from 0) has 0 tokens' in refusal(lambda: draw(prompts=[[1], []]))
    assert f'must have 1 to {MAX_PROMPT}' in refusal(lambda: draw(prompts=[[1] * (MAX_PROMPT + 1)]))
    for id in (-1, VOCAB):
        assert f'prompt 0 (counting from 0): token ids must be from 0 to {VOCAB - 1}' in refusal(
            lambda id=id: draw(prompts=[[1, id]])
        )
    assert 'temperature=-1.0: must be' in refusal(lambda: draw(temperature=-1.0))
    assert 'temperature=nan: must be' in refusal(lambda: draw(temperature=float('nan')))
    assert 'num_samples=0: must be' in refusal(lambda: draw(num_samples=0))
    assert 'rows_per_run=-1: must be' in refusal(lambda: draw(rows_per_run=-1))
    spread = make(num_devices=4, fsdp=4)
    sampler_on_mesh = Sampler(spread.config, spread.layout, ends=(), max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS)
    message = refusal(lambda: sampler_on_mesh(spread.params, PROMPTS, seed=0, rows_per_run=3))
    assert 'rows_per_run=3: must be 0 or at least 4' in message
