"""Initial parameters of each family: standard deviations and constants."""

import jax
import numpy as np
import pytest
from flax import nnx

from maxlm.model.decoder import Decoder
from tests.small import VOCAB, small_config

LAYERS, DIM = 8, 128


def initial(**overrides):
    config = small_config(model__num_layers=LAYERS, model__dim=DIM, model__num_heads=4, **overrides)
    return jax.device_get(jax.jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(0)))))())


def spread(array):
    return pytest.approx(np.std(array), rel=0.05)


def test_gpt2():
    state = initial(model__init_std=0.02)
    assert state['embedding'].shape == (VOCAB, DIM)
    assert spread(state['embedding']) == 0.02
    assert spread(state['position_embedding']) == 0.01
    attention = state['blocks']['attention']
    assert spread(attention['query']['kernel']) == 0.02
    assert spread(attention['out']['kernel']) == 0.02 / (2 * LAYERS) ** 0.5
    assert np.all(attention['out']['bias'] == 0)
    assert np.all(state['blocks']['attention_norm']['scale'] == 1)
    # Layers have different initial values.
    assert not np.allclose(attention['query']['kernel'][0], attention['query']['kernel'][1])


def test_gpt_neox():
    state = initial(model__family='gpt_neox')
    for kernel in (state['blocks']['feedforward']['up']['kernel'], state['embedding'], state['head']['kernel']):
        assert spread(kernel) == (2 / (5 * DIM)) ** 0.5
    for kernel in (state['blocks']['feedforward']['down']['kernel'], state['blocks']['attention']['out']['kernel']):
        assert spread(kernel) == 2 / (LAYERS * DIM**0.5)


def test_nanochat():
    state = initial(model__family='nanochat')
    assert spread(state['embedding']) == 1
    assert spread(state['head']['kernel']) == 0.001
    query = state['blocks']['attention']['query']['kernel']
    assert spread(query) == DIM**-0.5
    assert np.abs(query).max() <= (3 / DIM) ** 0.5
    assert np.all(state['blocks']['attention']['out']['kernel'] == 0)
    assert np.all(state['blocks']['feedforward']['down']['kernel'] == 0)
    # The norms have no parameters.
    assert set(state) == {'embedding', 'blocks', 'head'}
    assert set(state['blocks']) == {'attention', 'feedforward'}


def test_nanochat_of_2026():
    state = initial(model__family='nanochat', model__init='uniform_2026')
    assert spread(state['embedding']) == 0.8
    assert spread(state['head']['kernel']) == 0.001
    assert spread(state['blocks']['attention']['query']['kernel']) == DIM**-0.5
    up = state['blocks']['feedforward']['up']['kernel']
    assert spread(up) == 0.4 * DIM**-0.5
    assert np.abs(up).max() <= 0.4 * (3 / DIM) ** 0.5
    assert np.all(state['blocks']['attention']['out']['kernel'] == 0)
    assert np.all(state['blocks']['feedforward']['down']['kernel'] == 0)
    tied = initial(model__family='nanochat', model__init='uniform_2026', model__tie_embeddings=True)
    assert spread(tied['embedding']) == 0.02
