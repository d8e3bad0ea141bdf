"""What a model has learned at short windows it uses at longer ones, once positions are scaled and it has adapted."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxlm.model.decoder import Decoder
from tests.small import small_config

# Half a window is drawn at random, and comes once more: what is next stands half a window before.
SHORT, LONG, SYMBOLS = 64, 256, 16
RATE = 3e-3
# In a window as short as this no pair turns so often that it should be left as it is.
TURNS = {'model__rotary_beta_slow': 16.0, 'model__rotary_beta_fast': 32.0}
YARN = {'model__rotary_scaling': 'yarn', 'model__rotary_factor': LONG / SHORT, **TURNS}


def config_at(window, **overrides):
    sizes = {'model__num_layers': 1, 'model__dim': 64, 'model__num_heads': 2, 'model__ffn_dim': 128}
    return small_config(model__family='llama', data__window=window, **sizes, **overrides)


def losses(config, params, key, rows):
    """Of the tokens that are there for the second time: positions T/2 … T - 1."""
    window = config.data.window
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0))))
    block = jax.random.randint(key, (rows, window // 2), 0, SYMBOLS)
    tokens = jnp.concatenate([block, block], axis=1)
    model = nnx.merge(graph, params)
    hidden, _ = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), tokens[:, 1:])[:, window // 2 - 1 :]


def train(config, params, steps, rows):
    rate = optax.linear_schedule(RATE, 0, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, 0.9, 0.95))

    def step(carry, key):
        params, state = carry
        grads = jax.grad(lambda params: losses(config, params, key, rows).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params):
        keys = jax.random.split(jax.random.key(1), steps)
        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[0][0]

    return run(params)


def evaluate(config, params):
    return float(jax.jit(lambda params: losses(config, params, jax.random.key(2), 8).mean())(params))


def test_scaled_positions_and_a_few_steps_reach_further():
    short, plain = config_at(SHORT), config_at(LONG)
    params = train(short, nnx.to_pure_dict(nnx.state(Decoder(short.model, rngs=nnx.Rngs(0)))), 100, 32)
    uniform = math.log(SYMBOLS)
    assert evaluate(short, params) < 0.2 * uniform
    # Control: at a distance that it has not seen the model is worse than one that draws.
    unchanged = evaluate(plain, params)
    assert unchanged > 1.2 * uniform
    yarn = config_at(LONG, **YARN)
    assert evaluate(yarn, train(yarn, params, 30, 8)) < 0.3 * uniform
    # A larger base, as in Code Llama, turns fast pairs in another way too: after as many steps it draws, at least.
    base = config_at(LONG, model__rotary_theta=1e6)
    assert evaluate(base, train(base, params, 30, 8)) < 0.8 * unchanged
