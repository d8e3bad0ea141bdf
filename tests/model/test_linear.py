"""Several projections of one input, applied together and one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlm.model import linear
from maxlm.model.linear import Linear, apply_together
from maxlm.model.placement import ONE_DEVICE, OneDevice
from maxlm.planning.program import read_program

D = 8
OUTPUTS = {'heads': (4, 6), 'kv_heads': (2, 6), 'ffn': (10,)}


class Split(OneDevice):
    """Says that heads are split, as on a mesh."""

    def parts(self, axis):
        return 2 if axis == 'heads' else 1


def make(placement):
    rngs = nnx.Rngs(0)
    init = jax.nn.initializers.normal(1.0)
    made = [
        Linear(
            (D,),
            shape,
            in_axes=('embed',),
            out_axes=(axis, 'head_dim')[: len(shape)],
            init=init,
            use_bias=axis != 'ffn',
            matmul='default',
            placement=placement,
            rngs=rngs,
        )
        for axis, shape in OUTPUTS.items()
    ]
    for module in made[:2]:
        module.bias[...] = jax.random.normal(rngs.params(), module.bias.shape)
    return made


def outputs_and_gradients(apply, placement, x):
    graph, params = nnx.split(make(placement))

    def total(params, x):
        outputs = apply(nnx.merge(graph, params), x)
        return sum(((i + 1) * jnp.sin(y)).sum() for i, y in enumerate(outputs)), outputs

    compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True)).lower(params, x).compile()
    (_, outputs), gradients = compiled(params, x)
    text = compiled.as_text()
    return (
        [*outputs, *jax.tree.leaves(gradients)],
        text.count(' dot('),
        read_program(text, {'data': 1}),
    )


# For few rows it is not worth putting kernels side by side.
@pytest.mark.parametrize(
    ('placement', 'rows', 'products'), [(ONE_DEVICE, (2, 5), 1), (ONE_DEVICE, (9, 1), 3), (Split(), (2, 5), 3)]
)
def test_together_is_as_one_by_one(placement, rows, products, monkeypatch):
    monkeypatch.setattr(linear, 'JOINED_ROWS', 10)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(*rows, D)), jnp.float32)
    together, num_together, program = outputs_and_gradients(apply_together, placement, x)
    alone, num_alone, wanted = outputs_and_gradients(lambda linears, x: [f(x) for f in linears], ONE_DEVICE, x)
    assert [y.shape for y in together[:3]] == [(*rows, *shape) for shape in OUTPUTS.values()]
    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        # Control: they are not all alike.
        assert np.abs(found - 1.01 * expected).max() > 1e-3
    # Forward, and both products of the backward pass.
    assert (num_together, num_alone) == (3 * products, 9)
    assert program.flops == wanted.flops
