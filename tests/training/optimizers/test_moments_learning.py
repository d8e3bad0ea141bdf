"""Loss of a small decoder with bfloat16 and 8-bit moments equals that with float32, unlike with a crude code."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlm.training.optimizers.optimizer import scale_by_adam
from maxlm.training.state import abstract_model
from tests.small import small_config, small_layout, small_state

# A language in which a token usually determines the next one. If two tokens determined it, the loss would drop
# abruptly at a random step, when the model learns to attend to both.
SYMBOLS = 60
SMALL = {'model__num_layers': 1, 'model__dim': 32, 'model__num_heads': 2}
USUAL = {'model__dim': 64, 'data__seq_len': 32}


def sentences(config, num_steps):
    rng = np.random.default_rng(0)
    follows = rng.integers(0, SYMBOLS, (SYMBOLS, 3))
    B, T = config.train.global_batch_size, config.data.seq_len
    tokens = np.zeros((num_steps, B, T + 1), np.int32)
    tokens[..., 0] = rng.integers(0, SYMBOLS, (num_steps, B))
    for t in range(1, T + 1):
        choice = rng.choice(3, (num_steps, B), p=[0.85, 0.1, 0.05])
        tokens[..., t] = follows[tokens[..., t - 1], choice]
    return tokens


def crude():
    """Returns Adam with linearly quantized moments and one scale per array."""

    def rounded(x, levels):
        scale = jnp.abs(x).max()
        return jnp.round(x / jnp.maximum(scale, 1e-30) * levels) / levels * scale

    exact = optax.scale_by_adam(0.9, 0.95)

    def update(grads, state, params=None):
        directions, state = exact.update(grads, state, params)
        mu, nu = (jax.tree.map(lambda x, n=n: rounded(x, n), tree) for tree, n in ((state.mu, 127), (state.nu, 255)))
        return directions, state._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(exact.init, update)


def learn(config, direction, num_steps):
    """Returns the losses of all steps."""
    layout = small_layout(config)
    graph, _ = nnx.split(abstract_model(config, layout))
    params = small_state(config, layout).params
    # The rate decays to zero, so that the parameters hardly change during the last steps.
    rate = optax.linear_schedule(5e-3, 0, num_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), direction, optax.scale_by_learning_rate(rate))

    def objective(params, tokens_BT):
        model = nnx.merge(graph, params)
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1] - 1), tokens_BT[:, 1:].shape)
        hidden_BTD, _, _ = model(tokens_BT[:, :-1], segments_BT=None, positions_BT=positions_BT)
        return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden_BTD), tokens_BT[:, 1:]).mean()

    def step(carry, tokens_BT):
        params, state = carry
        loss, grads = jax.value_and_grad(objective)(params, tokens_BT)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def run(params, tokens_SBT):
        return jax.lax.scan(step, (params, optimizer.init(params)), tokens_SBT)[1]

    return np.array(run(params, sentences(config, num_steps)))


@pytest.mark.parametrize(
    ('settings', 'num_steps', 'types'),
    [
        (SMALL, 80, ('int8',)),
        pytest.param(USUAL, 180, ('bfloat16', 'int8'), marks=pytest.mark.nightly),
    ],
)
def test_a_model_learns_as_well(settings, num_steps, types):
    config = small_config(model__vocab_size=64, **settings)
    layout = small_layout(config)
    _, variables = nnx.split(abstract_model(config, layout))
    axes = {tuple(path): variable.axes for path, variable in nnx.to_flat_state(variables)}

    def final(direction):
        losses = learn(config, direction, num_steps)
        return losses[0], losses[-num_steps // 4 :].mean()

    def with_moments(stored):
        return scale_by_adam(beta1=0.9, beta2=0.95, epsilon=1e-8, moments=stored, axes=axes, layout=layout)

    first, expected = final(with_moments('float32'))
    assert expected < first / 2
    for stored in types:
        _, got = final(with_moments(stored))
        assert got != expected
        assert abs(got / expected - 1) < 0.001, stored
    # Negative control: a crude code learns worse.
    assert not abs(final(crude())[1] / expected - 1) < 0.05
