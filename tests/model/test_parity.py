"""Logits of each family against Transformers with the same weights; see `test_parity_steps.py` for training steps."""

import jax
import numpy as np
import pytest
import torch

from tests.huggingface.transformers_models import CASES, make_model, to_maxlm
from tests.model.transformers_logits import batch_of, their_logits
from tests.parameters import decoder_graph, logits

TOLERANCE = 1e-4


def our_logits(config, batch):
    """Returns a compiled function that maps parameters to logits."""
    graph = decoder_graph(config)
    kwargs = {'segments_BT': batch['segments'], 'positions_BT': batch['positions']}
    forward = jax.jit(lambda params: logits(graph, params, batch['tokens'], **kwargs))
    return lambda params: np.asarray(forward(params))


def compared(config, batch):
    """Returns the mask of the compared positions: no padding in models with experts, which do not process it."""
    return (batch['segments'] > 0) | (config.num_experts == 0)


def difference(case, batch, num_layers):
    """Returns the largest difference of the logits of the first layers."""
    model = make_model(case, num_layers=num_layers)
    config, params = to_maxlm(model)
    with torch.no_grad():
        theirs = their_logits(model, batch, config).numpy()
    return float(np.abs(our_logits(config, batch)(params) - theirs)[compared(config, batch)].max())


@pytest.mark.parametrize('name', CASES)
def test_logits_agree(name):
    model, batch = make_model(CASES[name]), batch_of(name)
    config, params = to_maxlm(model)
    with torch.no_grad():
        theirs = their_logits(model, batch, config).numpy()
    assert theirs.std() > 0.3, 'logits near zero would agree with anything'
    ours = our_logits(config, batch)
    worst = np.abs(ours(params) - theirs)[compared(config, batch)].max()
    if not worst <= TOLERANCE:
        by_depth = {n: difference(CASES[name], batch, n) for n in range(1, config.num_layers + 1)}
        pytest.fail(f'logits differ by {worst}; with the first n layers alone: {by_depth}')
    # Negative control: swapped or scaled heads are detected.
    kernel = params['blocks']['attention']['query']['kernel'].copy()
    if config.num_heads > 1:
        kernel[0, :, [0, 1]] = kernel[0, :, [1, 0]]
    else:
        kernel[0] *= 1.5
    params['blocks']['attention']['query']['kernel'] = kernel
    assert np.abs(ours(params) - theirs)[compared(config, batch)].max() > 100 * TOLERANCE
