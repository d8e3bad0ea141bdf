"""Size of a step's program, which does not depend on the number of layers, micro-batches and sequences."""

import jax
import pytest

from maxlm.training.batch import batch_shapes
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from tests.small import small_config, small_layout

# No other dimension has these sizes, because equal shapes would share functions of the lowered program.
FEW, MANY = 5, 20


def count_operations(**settings):
    """Returns the number of operations of the lowered step; nothing is compiled."""
    config = small_config(**settings)
    layout = small_layout(config)
    abstract, batch = abstract_state(config, layout), batch_shapes(config, layout)
    lowered = jax.jit(make_train_step(config, layout)).lower(abstract, batch)
    return lowered.as_text().count(' = ')


@pytest.fixture(scope='module')
def few_layers():
    return count_operations(model__num_layers=FEW)


def test_layers_in_a_loop_are_compiled_once(few_layers):
    assert count_operations(model__num_layers=MANY) == few_layers
    # Negative control: unrolled layers.
    one_layer, all_layers = (
        count_operations(model__num_layers=layers, model__scan_layers=False) for layers in (1, FEW)
    )
    assert all_layers > one_layer + 300 * (FEW - 1)
    assert all_layers > 1.25 * few_layers


def test_micro_batches_are_compiled_once(few_layers):
    few, many = (
        count_operations(model__num_layers=FEW, train__global_batch_size=rows, train__per_device_batch_size=1)
        for rows in (FEW, MANY)
    )
    assert few == many
    # Negative control: the program differs from that of a single micro-batch.
    assert few != few_layers
