"""One of two processes whose disks fill up alternately; started by `tests.forking` with the workdir."""

import json
import logging
import resource
import signal
import sys
import time

import jax
import numpy as np

from maxlm.checkpoint.manager import Checkpoints
from maxlm.parallel.layout import make_layout
from maxlm.runtime.initialize import initialize
from maxlm.training.state import abstract_state
from tests.small import small_config


def main():
    """Prints the results as JSON on the last line."""
    (workdir,) = sys.argv[1:]
    logging.getLogger('absl').setLevel(logging.ERROR)
    initialize()
    config = small_config(num_devices=2, model__num_layers=2, model__dim=64, model__num_heads=2)
    abstract = abstract_state(config, make_layout(config.mesh))

    def make(seed):
        rng = np.random.default_rng(seed)

        def fill(leaf):
            values = rng.integers(1, 99, leaf.shape) if leaf.dtype == np.int32 else rng.normal(size=leaf.shape)
            values = np.asarray(values, leaf.dtype)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])

        return jax.tree.map(fill, abstract)

    def equal(state, other):
        pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True)
        return all(np.array_equal(a.addressable_data(0), b.addressable_data(0)) for a, b in pairs)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages, newest, seconds, equal_states = [], [], [], []
    with Checkpoints(workdir, max_to_keep=2, on_failure=messages.append) as checkpoints:
        for step, full in ((1, None), (2, 1), (3, 0), (4, None)):
            if full == jax.process_index():
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
            began = time.monotonic()
            checkpoints.save(step, make(step), {})
            newest.append(checkpoints.wait())
            seconds.append(time.monotonic() - began)
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        equal_states.append(equal(checkpoints.restore_newest(abstract).state, make(4)))
        checkpoints.remove_after(3)
        newest.append(checkpoints.wait())
        checkpoints.save(4, make(5), {})
        newest.append(checkpoints.wait())
        equal_states.append(equal(checkpoints.restore_newest(abstract).state, make(5)))
        # The save is slow on the first process only; its result applies to both.
        checkpoints.save(5, make(6), {})
        saving = checkpoints._save
        if jax.process_index() == 0:
            saving.finish, finish = lambda seconds=None: False, saving.finish
        checkpoints.save(6, make(7), {}, wait_for_previous=False)
        if jax.process_index() == 0:
            saving.finish = finish
        newest.append(checkpoints.wait())
        checkpoints.save(6, make(7), {}, wait_for_previous=False)
        newest.append(checkpoints.wait())
    print(json.dumps({'messages': messages, 'newest': newest, 'seconds': seconds, 'same': equal_states}))
