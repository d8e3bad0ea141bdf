"""Runs known-answer tests in two processes with virtual devices, of which one or none has a wrong kernel."""

import json

import jax
import numpy as np
from jax.sharding import Mesh

from maxlm.errors import InputError
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.runtime.initialize import initialize
from maxlm.training.known_answers import check
from maxlm.training.known_answers.layers import norm_answer
from tests.small import small_config


def main():
    """Prints the error of each case as JSON: no wrong kernel, one in process 0, one in process 1, and none again."""
    initialize()
    # The virtual devices stand for GPUs.
    check.UNTESTED_PLATFORM = ''
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ('data', 'tensor'))
    right = norm_answer(small_config().model, 8)
    wrong = right._replace(run=lambda *inputs: tuple(2 * array for array in right.run(*inputs)))
    errors = []
    with Heartbeats():
        for process in (None, 0, 1, None):
            answer = wrong if jax.process_index() == process else right
            try:
                check.check_kernels(lambda answer=answer: [answer], 'case', mesh, cache=None)
                errors.append('')
            except InputError as error:
                errors.append(str(error))
    print(json.dumps(errors))
