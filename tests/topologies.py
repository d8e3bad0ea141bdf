"""Devices that are not here, for programs that are only compiled."""

import functools
import os

from jax.experimental import topologies


@functools.cache
def tpu_devices(name):
    """The chips of a TPU slice as `v4:2x2x4`, by the compiler alone."""
    # No metadata server to ask, and several test processes on one machine.
    os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true'}
    # Two cores of a v4 or v5p chip are one device, as on the real ones.
    options = {'chip_config_name': 'megacore'} if name.startswith(('v4', 'v5p')) else {}
    return topologies.get_topology_desc(topology_name=name, platform='tpu', **options).devices
