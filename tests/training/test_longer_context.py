"""Extension of a model trained on short sequences to longer ones by position scaling and short training."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from maxlm.model.decoder import Decoder
from tests.small import small_config

# 33 random symbols are repeated, so the next symbol occurred 32 symbols before. Long sequences contain each symbol four
# times, so the distance is 128 tokens.
SHORT, LONG, SYMBOLS, PERIOD = 64, 256, 16, 33
RATE = 3e-3
LINEAR, YARN = (
    {'model__rope_scaling': kind, 'model__rope_scaling_factor': LONG / SHORT} for kind in ('linear', 'yarn')
)


def config_at(seq_len, **overrides):
    sizes = {'model__num_layers': 1, 'model__dim': 64, 'model__num_heads': 2, 'model__ffn_dim': 128}
    return small_config(model__family='llama', data__seq_len=seq_len, **sizes, **overrides)


def losses(config, params, key, rows):
    """Returns the losses of the first token of each repeated symbol."""
    stretch = config.data.seq_len // SHORT
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0))))
    block = jax.random.randint(key, (rows, PERIOD), 0, SYMBOLS)
    tokens = jnp.repeat(jnp.concatenate([block, block], axis=1)[:, :SHORT], stretch, axis=1)
    model = nnx.merge(graph, params)
    hidden, _, _ = model(tokens)
    before = slice(PERIOD * stretch - 1, -1, stretch)
    targets = tokens[:, PERIOD * stretch :: stretch]
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden[:, before]), targets)


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


@pytest.fixture(scope='module')
def learned():
    """Returns parameters that were trained on short sequences."""
    config = config_at(SHORT)
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(0)))))()
    return train(config, params, 100, 32)


def test_linear_scaling_extends_the_context_without_training(learned):
    uniform = math.log(SYMBOLS)
    assert evaluate(config_at(SHORT), learned) < 0.3 * uniform
    # Negative control: at an unseen distance, the model is worse than random predictions.
    assert evaluate(config_at(LONG), learned) > 1.2 * uniform
    # With linear scaling, the scaled distance occurred in training.
    assert evaluate(config_at(LONG, **LINEAR), learned) < 0.4 * uniform


@pytest.mark.nightly
def test_scaling_and_a_few_steps_extend_the_context(learned):
    yarn = config_at(LONG, **YARN)
    # YaRN does not scale the fastest pair, which must be relearned.
    assert evaluate(yarn, train(yarn, learned, 80, 8)) < 0.4 * math.log(SYMBOLS)
    # A larger base changes all rotations, so adaptation takes longer and initially unlearns.
    base = config_at(LONG, model__rope_theta=1e6)
    assert evaluate(base, train(base, learned, 20, 8)) < 0.8 * evaluate(config_at(LONG), learned)
