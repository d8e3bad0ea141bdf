"""Tests the known answers of collectives on virtual devices, with wrong collectives as negative controls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxlm.training.known_answers import collectives
from maxlm.training.known_answers.collectives import wrong_collective

WIDTH = 96
NAMES = {
    'all-reduce': '_all_reduce',
    'all-gather': '_all_gather',
    'reduce-scatter': '_reduce_scatter',
    'all-to-all': '_all_to_all',
}


def mesh():
    return Mesh(np.array(jax.devices()[:6]).reshape(2, 1, 3), ('data', 'fsdp', 'tensor'))


def test_exact_collectives():
    assert wrong_collective(mesh(), WIDTH) == ''


@pytest.mark.parametrize('name', NAMES)
def test_one_wrong_number_on_one_device_is_named(name, monkeypatch):
    exact = getattr(collectives, NAMES[name])

    def wrong(x, axis):
        y = exact(x, axis)
        is_here = (jax.lax.axis_index('tensor') == 2) & (jax.lax.axis_index('data') == 1) & (axis == 'tensor')
        return y.at[-1].add(jnp.where(is_here, 1, 0))

    monkeypatch.setattr(collectives, NAMES[name], wrong)
    found = wrong_collective(mesh(), WIDTH)
    assert found == f'{name} of 96 numbers along mesh.tensor=3 is wrong on device 5; check the devices and their links'


def test_a_missing_device_in_a_sum_is_found(monkeypatch):
    def without_first(x, axis):
        return jax.lax.psum(jnp.where(jax.lax.axis_index(axis) == 0, 0, x), axis)

    monkeypatch.setattr(collectives, '_all_reduce', without_first)
    found = wrong_collective(mesh(), WIDTH)
    assert found.startswith('all-reduce of 96 numbers along mesh.data=2 is wrong on device 0, 1, 2, 3, 4, 5;')
