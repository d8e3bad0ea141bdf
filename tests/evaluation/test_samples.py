"""Tests that samples are equal on all meshes and to the engine's output. Default prompts are starts of documents."""

import dataclasses

import jax
import numpy as np
import pytest

from maxlm.config.resolve import resolve
from maxlm.data.loader.dataset import open_training_data
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.samples import PROMPT_TOKENS, SEED, TEMPERATURE, Samples, prompts
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Request
from maxlm.inference.load import LoadedModel
from maxlm.inference.sampling import Sampling
from maxlm.training.state import abstract_state, init_state
from tests.small import build_config, small_layout

PROMPTS = ('License', 'You may not', 'a')


def sampler_of(config, layout):
    corpus = open_training_data(config.data)
    return Samples(config, corpus, corpus.first.load_tokenizer(), layout)


def make_config(dataset, num_devices=1, **overrides):
    settings = {
        'model__num_layers': 2,
        'model__dim': 32,
        'model__num_heads': 4,
        'model__dtype': 'float32',
        'model__init_std': 0.3,
        'data__path': str(dataset),
        'data__seq_len': 32,
        'train__num_steps': 1,
        'train__global_batch_size': 8,
        'eval__sample_prompts': PROMPTS,
        'eval__sample_max_tokens': 12,
        **overrides,
    }
    return resolve(build_config(**settings), platform='cpu', num_devices=num_devices, vocab_size=257, windows=100)


def make_samples(dataset, params=None, num_devices=1, **overrides):
    """Returns config, layout, parameters and samples. Without `params`, new parameters are initialized."""
    config = make_config(dataset, num_devices, **overrides)
    layout = small_layout(config)
    if params is None:
        params = init_state(config, layout).params
    else:
        abstract = abstract_state(config, layout).params
        params = jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), params, abstract)
    return config, layout, params, sampler_of(config, layout)(params)


@pytest.fixture(scope='module')
def one_device(dataset):
    return make_samples(dataset)


def test_engine_generates_the_same_samples(dataset, one_device):
    config, layout, params, samples = one_device
    assert [sample.prompt for sample in samples] == list(PROMPTS)
    path = open_training_data(config.data).first.tokenizer_path
    tokenizer = Tokenizer.load(path)
    engine = Engine(LoadedModel(config, layout, params, tokenizer, path, 0))
    ids = [ids.tolist() for ids in tokenizer.encode_batch(PROMPTS)]

    def texts(seed):
        requests = [Request(tuple(prompt), 12, Sampling(temperature=TEMPERATURE), seed) for prompt in ids]
        return [tokenizer.decode(row.ids) for (row,) in engine.complete(requests)]

    assert [sample.text for sample in samples] == texts(SEED)
    # Negative control: another seed gives other text.
    assert [sample.text for sample in samples] != texts(SEED + 1)


@pytest.mark.parametrize(
    'mesh',
    [
        {'data': 2, 'fsdp': 2, 'tensor': 2},
        {'fsdp': 2, 'context': 2, 'stage': 2},
        {'fsdp': 8, 'offload': 'all'},
    ],
    ids=str,
)
def test_samples_are_equal_on_all_meshes(dataset, one_device, mesh):
    axes = {f'mesh__{axis}': size for axis, size in mesh.items()}
    micro_batch = {'train__per_device_batch_size': 1} if 'stage' in mesh else {}
    _, _, params, samples = one_device
    assert make_samples(dataset, params, 8, **axes, **micro_batch)[-1] == samples


def test_sampling_is_repeatable_and_keeps_the_parameters(dataset, one_device):
    config, layout, params, samples = one_device
    before = jax.tree.map(np.asarray, params)
    again = sampler_of(config, layout)
    assert again(params) == again(params) == samples
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, params))
    # Negative control: other parameters give other text.
    assert again(jax.tree.map(lambda x: 0.5 * x, params)) != samples


def test_prompts_are_starts_of_validation_documents(dataset):
    corpus = open_training_data(make_config(dataset, data__seq_len=256).data)
    tokenizer = Tokenizer.load(corpus.first.tokenizer_path)
    windows = corpus.sources[0].windows('validation', corpus.data)
    stream = np.concatenate([windows.stream(number)[:256] for number in range(len(windows))])
    text = tokenizer.decode(stream)
    end = tokenizer.decode([tokenizer.end_of_document])
    starts = [part[:PROMPT_TOKENS] for part in text.split(end)]
    chosen = [tokenizer.decode(ids) for ids in prompts(corpus, 2)]
    assert len(chosen) == 2
    assert all(prompt in starts for prompt in chosen)
    # The prompts are reproducible, and differ with another data seed.
    assert [tokenizer.decode(ids) for ids in prompts(corpus, 2)] == chosen
    seeds = [dataclasses.replace(corpus, data=dataclasses.replace(corpus.data, seed=seed)) for seed in range(1, 9)]
    assert any([tokenizer.decode(ids) for ids in prompts(other, 2)] != chosen for other in seeds)
    # The number of prompts is limited by the number of sequences.
    assert 1 <= len(prompts(corpus, 1000)) <= len(windows)


def test_prompt_that_fills_the_context_is_rejected(dataset, one_device):
    config, layout, params, _ = one_device
    # An odd number of tokens is not divisible by the number of devices.
    config = make_config(dataset, data__seq_len=33, eval__sample_prompts=('x' * 32,))
    (sample,) = sampler_of(config, layout)(params)
    assert len(sample.prompt) == 32
    config = make_config(dataset, data__seq_len=33, eval__sample_prompts=('x' * 33,))
    with pytest.raises(InputError, match=r'eval.sample_prompts: .* has 33 tokens.* at most 32'):
        sampler_of(config, layout)


def test_prompts_are_all_different(dataset):
    config = make_config(dataset, eval__sample_prompts=(), eval__num_samples=2)
    found = prompts(open_training_data(config.data), 1000)
    assert 1 < len(found) < 1000
    assert len({tuple(ids) for ids in found}) == len(found)
    assert prompts(open_training_data(config.data), 1000) == found
