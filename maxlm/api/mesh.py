"""The device mesh of a config."""

from __future__ import annotations

import math

import jax

from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.parallel.layout import Layout, make_layout


def make_mesh(config: Config) -> Layout:
    """Returns the device mesh of a resolved config, with the rules that shard arrays over it.

    `Layout.mesh` is the `jax.sharding.Mesh`.

    Raises:
        InputError: the config is not resolved, or it is resolved for another number of devices.
    """
    sizes = config.mesh.sizes
    if math.prod(sizes.values()) != jax.device_count() or min(sizes.values()) < 1:
        text = ' '.join(f'{axis}={size}' for axis, size in sizes.items())
        raise InputError(f'mesh {text} does not cover {jax.device_count()} devices; use config.resolve(dataset)')
    return make_layout(config.mesh)
