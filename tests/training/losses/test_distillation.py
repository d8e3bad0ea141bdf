"""Tests the distillation loss and its gradients against plain formulas, on one device and on shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config.sections.distill import DistillConfig
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.losses.distillation import (
    StoredOutputs,
    TeacherOutputs,
    dense_distribution,
    distillation,
    kl_divergence,
    largest,
    top_k_log_probs,
)
from tests.small import small_config, small_layout

B, T, D, TEACHER_D, V = 4, 6, 8, 12, 23
CHUNK = 8
RNG = np.random.default_rng(0)
HIDDEN, KERNEL = (RNG.normal(size=shape).astype(np.float32) for shape in ((B, T, D), (D, V)))
TEACHER = TeacherOutputs(
    *(RNG.normal(size=shape).astype(np.float32) for shape in ((B, T, TEACHER_D), (TEACHER_D, V))), 4.0
)
TARGETS = RNG.integers(0, V, (B, T))
WEIGHTS = (RNG.random((B, T)) < 0.7).astype(np.float32)


def run(hidden=HIDDEN, kernel=KERNEL, *, teacher=TEACHER, partitioning=SINGLE_DEVICE, z_loss=0.0, softcap=0.0, **keys):
    """Returns the losses, and the gradients of the objective."""

    def objective(hidden, kernel):
        found = distillation(
            hidden,
            kernel,
            teacher,
            TARGETS,
            WEIGHTS,
            distill=DistillConfig(**keys),
            partitioning=partitioning,
            chunk=CHUNK,
            z_loss=z_loss,
            logit_softcap=softcap,
        )
        return found.objective, found

    (_, found), gradients = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(hidden, kernel)
    return jax.device_get(found), jax.device_get(gradients)


def log_softmax(x):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(x)))


def plain_divergence(hidden, kernel, temperature, top_k):
    """Returns weight · τ² · KL of each position [B, T], in the order of the tokens that the teacher prefers."""
    capped = 4 * jnp.tanh(TEACHER.hidden_BTD @ TEACHER.kernel_DV / 4)
    log_p, log_q = jax.nn.log_softmax(capped / temperature), jax.nn.log_softmax(hidden @ kernel / temperature)
    order = jnp.argsort(-log_p, axis=-1)
    log_p, log_q = (jnp.take_along_axis(x, order, axis=-1) for x in (log_p, log_q))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    kept = (p * (log_p - log_q))[..., :top_k].sum(-1)
    if top_k < V:
        rest_p, rest_q = p[..., top_k:].sum(-1), q[..., top_k:].sum(-1)
        kept += rest_p * jnp.log(rest_p / rest_q)
    return WEIGHTS * temperature**2 * kept


def plain_objective(hidden, kernel, weight, temperature, top_k, z_loss):
    scores = hidden @ kernel
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), TARGETS[..., None], axis=-1)[..., 0]
    z_term = z_loss * jnp.square(jax.nn.logsumexp(scores, axis=-1))
    divergence = plain_divergence(hidden, kernel, temperature, top_k)
    return (WEIGHTS * (z_term - (1 - weight) * chosen) + weight * divergence).sum()


@pytest.mark.parametrize(
    ('weight', 'temperature', 'top_k', 'z_loss'), [(0.5, 1.0, 0, 0.0), (0.3, 2.0, 0, 0.1), (1.0, 0.5, 5, 0.0)]
)
def test_values_and_gradients_equal_the_formula(weight, temperature, top_k, z_loss):
    found, gradients = run(weight=weight, temperature=temperature, top_k=top_k, z_loss=z_loss)
    arguments = (weight, temperature, top_k or V, z_loss)
    expected, of_both = jax.value_and_grad(plain_objective, (0, 1))(HIDDEN, KERNEL, *arguments)
    np.testing.assert_allclose(found.objective, expected, rtol=1e-5)
    np.testing.assert_allclose(
        found.divergence_B, plain_divergence(HIDDEN, KERNEL, temperature, top_k or V).sum(1), rtol=1e-4, atol=1e-5
    )
    for gradient, right in zip(gradients, of_both, strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-3, atol=1e-4)
    # Control: the loss depends on each setting.
    assert abs(plain_objective(HIDDEN, KERNEL, weight, 1.1 * temperature, top_k or V, z_loss) - expected) > 1e-3


def test_all_tokens_as_top_k_equal_the_complete_distribution():
    complete, gradients = run(weight=0.7)
    found, same = run(weight=0.7, top_k=V)
    fewer, _ = run(weight=0.7, top_k=V - 1)
    small, _ = run(weight=0.7, top_k=3)
    np.testing.assert_array_equal(found.objective, complete.objective)
    jax.tree.map(np.testing.assert_array_equal, same, gradients)
    # One token in the bucket of the rest is a token of its own.
    np.testing.assert_allclose(fewer.objective, complete.objective, rtol=1e-5)
    # Merging tokens loses information, so the divergence decreases.
    assert small.divergence_B.sum() < 0.95 * complete.divergence_B.sum()


def test_a_student_equal_to_its_teacher_has_no_gradient():
    teacher = TeacherOutputs(HIDDEN, KERNEL, 0.0)
    for top_k in (0, 4):
        found, gradients = run(teacher=teacher, weight=1.0, temperature=2.0, top_k=top_k)
        np.testing.assert_allclose(found.objective, 0, atol=1e-4)
        assert max(np.abs(gradient).max() for gradient in gradients) < 1e-5
    _, control = run(weight=1.0, temperature=2.0)
    assert np.abs(control[0]).max() > 1e-2


@pytest.mark.parametrize('top_k', [0, 5])
def test_shards_equal_one_device(top_k):
    """The vocabulary of 23 tokens is padded on 2 devices."""
    layout = small_layout(small_config(8, mesh__fsdp=2, mesh__context=2, mesh__tensor=2, data__seq_len=16))
    keys = {'weight': 0.6, 'temperature': 0.5, 'top_k': top_k, 'z_loss': 0.1, 'softcap': 5.0}
    found, gradients = run(partitioning=layout, **keys)
    expected, right = run(**keys)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients, right)


def test_the_largest_scores_do_not_depend_on_the_shards():
    scores = jnp.asarray(RNG.normal(size=(3, 24)))
    for k in (1, 5, 13, 24):
        expected = scores >= jnp.sort(scores)[:, -k][:, None]
        for shards in (1, 2, 8):
            found = largest(scores, k, shards)
            np.testing.assert_array_equal(found, expected)
            assert (found.sum(1) == k).all()


def test_the_divergence_of_a_distribution_without_rest_is_finite():
    log_q = jnp.asarray(log_softmax([0.0, 1.0, 2.0]))
    for log_probs in ([0.0], [1e-3]):
        log_p, log_rest = dense_distribution(jnp.array([0]), jnp.array(log_probs), 3)
        np.testing.assert_allclose(kl_divergence(log_p, log_rest, log_q), -log_q[0], rtol=1e-2)


@pytest.mark.parametrize('mesh', [{}, {'mesh__fsdp': 2, 'mesh__context': 2, 'mesh__tensor': 2}])
def test_stored_outputs_equal_the_teacher(mesh):
    outputs = top_k_log_probs(
        *TEACHER[:2], k=7, temperature=2.0, partitioning=SINGLE_DEVICE, chunk=CHUNK, logit_softcap=4.0
    )
    layout = small_layout(small_config(8, **mesh)) if mesh else SINGLE_DEVICE
    for top_k in (7, 5):
        keys = {'weight': 0.8, 'temperature': 2.0, 'top_k': top_k}
        found, gradients = run(teacher=StoredOutputs(*jax.device_get(outputs)), partitioning=layout, **keys)
        expected, right = run(**keys)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients, right)
    assert abs(run(weight=0.8, temperature=2.0)[0].objective - expected.objective) > 1e-3
