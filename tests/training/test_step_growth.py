"""The program of a step is as long for many layers, micro-batches and sequences as for few."""

import pytest

from benchmarks.growth_steps import count_instructions
from maxlm.planning.compile import compile_train_step
from maxlm.training.state import abstract_state
from tests.small import small_config, small_layout

FEW, MANY = 4, 16


def program(**settings):
    config = small_config(**settings)
    layout = small_layout(config)
    return compile_train_step(config, layout, abstract_state(config, layout)).step.as_text()


@pytest.fixture(scope='module')
def few_layers():
    return count_instructions(program(model__num_layers=FEW))


def test_layers_in_a_loop_are_compiled_once(few_layers):
    assert count_instructions(program(model__num_layers=MANY)) == few_layers
    # Control: layers that are written out.
    one, all_of_them = (program(model__num_layers=layers, model__scan_layers=False) for layers in (1, FEW))
    assert count_instructions(all_of_them) > count_instructions(one) + 300 * (FEW - 1)
    assert count_instructions(all_of_them) > 1.25 * few_layers


def test_micro_batches_are_compiled_once(few_layers):
    few, many = (
        count_instructions(program(model__num_layers=FEW, train__global_batch=rows, train__micro_batch=1))
        for rows in (FEW, MANY)
    )
    assert few == many
    # Control: it is another program than that of a single one.
    assert few != few_layers
