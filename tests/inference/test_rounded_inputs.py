"""Tests generation with inputs in 8 bits, with the compiled kernels and without."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.inference import prepared_decoder
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Request
from maxlm.inference.load import load_model
from maxlm.inference.quantize_checkpoint import parse_weights, quantize_checkpoint
from maxlm.inference.sampling import Sampling
from maxlm.model.layers import rounded_inputs
from maxlm.model.layers.weight_only_quantization import Codes, Weights, quantize
from maxlm.model.packed_kernels import pack_codes, pack_scales
from maxlm.runtime.cpu_kernels import register_cpu_kernels
from maxlm.workdir.files import CONFIG, read_config
from tests.inference.saved_models import write
from tests.parameters import random_params
from tests.small import EXPERTS, small_config

PROMPTS, NUM = ((3, 1, 4, 1, 5, 9, 2, 6), (7,)), 6
KEYS = {
    'model__family': 'llama',
    'model__dim': 64,
    'model__num_heads': 2,
    'model__num_kv_heads': 1,
    'model__ffn_dim': 128,
    'model__vocab_size': 257,
    'model__max_positions': 64,
}


def saved(folder, name, **keys):
    config = small_config(**{**KEYS, **keys})
    write(folder / name, config, random_params(config, std=0.15))
    return str(folder / name)


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    return saved(tmp_path_factory.mktemp('rounded'), 'run')


def generate(checkpoint, quantize):
    """Returns the log-probabilities of greedy continuations by prompt."""
    engine = Engine(load_model(checkpoint, num_devices=1, quantize=quantize), num_slots=2)
    requests = [Request(prompt, NUM, Sampling(temperature=0), top_log_probs=0, ignore_eos=True) for prompt in PROMPTS]
    found = [samples[0] for samples in engine.complete(requests)]
    return [(one.ids, np.array([token.log_prob for token in one.tokens])) for one in found]


def difference(found, expected):
    """Returns the largest difference of the log-probabilities, up to the first different token.

    It is infinite if the first tokens differ.
    """
    largest = 0.0
    for (ids, values), (other_ids, others) in zip(found, expected, strict=True):
        equal = np.cumprod(np.array(ids) == np.array(other_ids)).astype(bool)
        if not equal[0]:
            return np.inf
        largest = max(largest, np.abs(values - others)[equal].max())
    return largest


@pytest.mark.parametrize('quantize', ['w8a8', 'w4a8'])
@pytest.mark.parametrize('tied', [True, False])
def test_the_compiled_kernels_give_what_xla_gives(tmp_path, monkeypatch, quantize, tied):
    checkpoint = saved(tmp_path, 'run', model__tie_embeddings=tied)
    packed = generate(checkpoint, quantize)
    monkeypatch.setattr(prepared_decoder, 'register_cpu_kernels', lambda: False)
    by_xla, floats = generate(checkpoint, quantize), generate(checkpoint, '')
    # Only the compiled kernels round the inputs of the logits.
    assert difference(packed, by_xla) < 0.03
    # Control: the rounding of the kernels changes the log-probabilities.
    assert difference(packed, floats) > {'w8a8': 1e-3, 'w4a8': 0.05}[quantize]


@pytest.mark.parametrize('kind', ['int8', 'int4'])
def test_inputs_that_are_not_finite_or_tiny(kind):
    """The product is NaN wherever its input has one, at any place, and neither NaN nor infinite for tiny inputs."""
    assert register_cpu_kernels()
    rng = np.random.default_rng(0)
    codes, scales = quantize(jnp.asarray(rng.normal(size=(64, 16)), jnp.float32), 1, Weights(kind, 32))
    packed = Codes(pack_codes(codes, 1, kind), pack_scales(scales, 1))
    places = itertools.product([0, 5, 31, 32, 63], [np.nan, np.inf, -np.inf])
    x_MI = rng.normal(size=(15, 64)).astype(np.float32)
    for row, (place, value) in enumerate(places):
        x_MI[row, place] = value
    assert np.isnan(rounded_inputs.product(x_MI, packed, 16, kind)).all()
    assert (np.isnan(rounded_inputs.round_rows(x_MI)).sum(axis=1) == 32).all()
    tiny_MI = np.full((4, 64), [[0], [1e-45], [2e-38], [3e-37]], np.float32)
    for y in (rounded_inputs.product(tiny_MI, packed, 16, kind), rounded_inputs.round_rows(tiny_MI)):
        assert (np.abs(y) < 1e-35).all()


def test_a_quantized_checkpoint(workdir, tmp_path):
    stored = quantize_checkpoint(workdir, str(tmp_path / 'int8'), parse_weights('int8'), show=False)
    found, expected = generate(str(stored.workdir), 'w8a8'), generate(workdir, 'w8a8')
    assert difference(found, expected) == 0
    with pytest.raises(InputError, match='already quantized to int8'):
        load_model(str(stored.workdir), num_devices=1, quantize='w4a8')


def test_only_the_option_rounds_inputs(tmp_path):
    """A changed config.json would skip the checks of the option, and pack only the head of this model."""
    checkpoint = saved(tmp_path, 'run')
    path = tmp_path / 'run' / CONFIG
    path.write_text(path.read_text().replace('"activation_quantization": "none"', '"activation_quantization": "int8"'))
    assert read_config(tmp_path / 'run').model.activation_quantization == 'int8'
    assert load_model(checkpoint, num_devices=1).config.model.activation_quantization == 'none'


def test_a_cpu_computes_in_float32(tmp_path):
    model = load_model(saved(tmp_path, 'run', model__dtype='bfloat16'), num_devices=1)
    assert model.config.model.dtype == 'float32'


def test_refusals(workdir, tmp_path):
    with pytest.raises(InputError, match=r'--quantize=w8a8: is for one CPU device, but found 2 devices; use .*=int8'):
        load_model(workdir, num_devices=2, quantize='w8a8')
    experts = saved(tmp_path, 'experts', **EXPERTS)
    with pytest.raises(InputError, match=r'--quantize=w4a8: .* experts; use --quantize=int4'):
        load_model(experts, num_devices=1, quantize='w4a8')
    with pytest.raises(InputError, match="quantize='w8' is unknown; use one of int8, int4, fp8, w8a8, w4a8"):
        load_model(workdir, num_devices=1, quantize='w8')
