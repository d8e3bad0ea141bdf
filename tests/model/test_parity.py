"""Logits, loss and one step of AdamW against Transformers with the same weights, for every family."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from maxlm.model.decoder import Decoder
from maxlm.model.windows import layer_windows
from maxlm.training.state import init_state
from maxlm.training.step import make_train_step
from tests.huggingface.transformers_models import CASES, VOCAB, from_maxlm, make_model, to_maxlm
from tests.small import small_config, small_layout

TOLERANCE = 1e-4
LENGTH = 24


def make_batch():
    """Three rows of random ids: one document, three documents, and two with padding behind; the longest have 24 and 17.

    All rows hold a document of more than 16 tokens, so that dynamic scaling of an original context of 16 is at work.
    """
    rng = np.random.default_rng(0)
    segments = np.ones((3, LENGTH), np.int32)
    segments[1, 3:20], segments[1, 20:] = 2, 3
    segments[2, 3:20], segments[2, 20:] = 2, 0
    starts = np.maximum.accumulate(np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(LENGTH), 0), axis=1)
    targets = rng.integers(0, VOCAB, segments.shape, dtype=np.int32)
    last = np.diff(segments, axis=1, append=-1) != 0
    return {
        'tokens': rng.integers(0, VOCAB, segments.shape, dtype=np.int32),
        'targets': targets,
        'weights': np.where(last | (segments == 0), 0, 1).astype(np.float32),
        'segments': segments,
        'positions': np.arange(LENGTH, dtype=np.int32) - starts.astype(np.int32),
    }


BATCH = make_batch()


def one_document(batch):
    """The first row three times: what dynamic scaling needs, as Transformers goes by the longest row of a batch."""
    return {name: np.repeat(array[:1], 3, axis=0) for name, array in batch.items()}


def batch_of(name):
    return one_document(BATCH) if 'dynamic' in name else BATCH


def attention_masks(batch, config):
    """Additive masks [B, 1, T, T] of documents, for all layers or by the layer's type, as Transformers takes them."""
    segments, index = batch['segments'], np.arange(LENGTH)

    def mask(window):
        behind = index[:, None] - index[None, :]
        seen = (behind >= 0) & ((behind < window) if window else True)
        seen = seen & (segments[:, :, None] == segments[:, None, :])
        return torch.from_numpy(np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)[:, None])

    windows = set(layer_windows(config))
    if len(windows) == 1:
        return mask(windows.pop())
    return {'full_attention': mask(0), 'sliding_attention': mask(config.sliding_window)}


def their_logits(model, batch, config):
    return model(
        input_ids=torch.from_numpy(batch['tokens']).long(),
        position_ids=torch.from_numpy(batch['positions']).long(),
        attention_mask=attention_masks(batch, config),
        use_cache=False,
    ).logits


def our_logits(config, params, batch):
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    @jax.jit
    def forward(params):
        model = nnx.merge(graph, params)
        hidden, _ = model(batch['tokens'], segments_BT=batch['segments'], positions_BT=batch['positions'])
        return model.logits(hidden)

    return np.asarray(forward(jax.tree.map(jnp.asarray, params)))


def difference(case, batch, *, num_layers=None):
    """Largest difference of the logits of the first layers, and the spread of Transformers' logits."""
    model = make_model(case, num_layers=num_layers)
    config, params = to_maxlm(model)
    with torch.no_grad():
        theirs = their_logits(model, batch, config).numpy()
    return np.abs(our_logits(config, params, batch) - theirs).max(), theirs.std()


@pytest.mark.parametrize('name', CASES)
def test_logits_agree(name):
    worst, spread = difference(CASES[name], batch_of(name))
    assert spread > 0.3, 'logits near zero would agree with anything'
    if not worst <= TOLERANCE:
        layers = to_maxlm(make_model(CASES[name]))[0].num_layers
        by_depth = {n: float(difference(CASES[name], batch_of(name), num_layers=n)[0]) for n in range(1, layers + 1)}
        pytest.fail(f'logits differ by {worst}; with the first n layers alone: {by_depth}')


@pytest.mark.parametrize('name', ['gpt2', 'neox', 'llama', 'qwen3', 'nanochat'])
def test_two_heads_that_changed_places_would_be_seen(name):
    model = make_model(CASES[name])
    config, params = to_maxlm(model)
    kernel = params['blocks']['attention']['query']['kernel']
    kernel[0, :, [0, 1]] = kernel[0, :, [1, 0]]
    with torch.no_grad():
        theirs = their_logits(model, BATCH, config).numpy()
    assert np.abs(our_logits(config, params, BATCH) - theirs).max() > 100 * TOLERANCE


STEPPED = [
    'gpt2',
    'neox half rotary',
    'llama one key head, tied',
    'llama llama3',
    'mistral sliding',
    'qwen3 mixed, yarn',
    'nanochat',
]
# A large epsilon: some gradients are zero but for rounding (a bias of the keys), and Adam's first step without it
# would be their sign.
OPTIMIZER = {
    'optimizer__learning_rate': 1e-2,
    'optimizer__warmup_steps': 0,
    'optimizer__schedule': 'constant',
    'optimizer__epsilon': 1e-4,
    'optimizer__weight_decay': 0.5,
    'optimizer__clip_norm': 1.0,
}


def their_step(model, batch, config):
    """Loss, and parameters by name after one clipped step of AdamW with decay on matrices."""
    logits = their_logits(model, batch, config)
    targets, weights = torch.from_numpy(batch['targets']).long(), torch.from_numpy(batch['weights'])
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='none')
    loss = (losses * weights.flatten()).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{'params': matrices, 'weight_decay': 0.5}, {'params': vectors, 'weight_decay': 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4).step()
    return loss.item(), {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize('name', STEPPED)
def test_loss_and_a_step_of_adamw_agree(name):
    model = make_model(CASES[name])
    model_config, params = to_maxlm(model)
    before = from_maxlm(model, model_config, params)
    config = small_config(data__window=LENGTH, train__global_batch=3, **OPTIMIZER)
    config = dataclasses.replace(config, model=model_config)
    layout = small_layout(config)
    state = init_state(config, layout)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    state = state._replace(params=jax.tree.map(jnp.asarray, params))
    state, metrics = jax.jit(make_train_step(config, layout))(state, layout.put_batch(BATCH, 3))

    loss, theirs = their_step(model, BATCH, model_config)
    assert float(metrics['loss']) == pytest.approx(loss, abs=1e-5)
    for tensor, array in from_maxlm(model, model_config, state.params).items():
        np.testing.assert_allclose(array, theirs[tensor], atol=1e-5, err_msg=tensor)
        # Control: the step is a hundred times larger than what is allowed.
        assert np.abs(array - before[tensor]).max() > 1e-3, tensor
