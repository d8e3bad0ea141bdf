"""Loss and one AdamW step against Transformers with the same weights; see `test_parity.py` for logits."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from maxlm.training.step import make_train_step
from tests.huggingface.transformers_models import CASES, from_maxlm, make_model, state_in_file, to_maxlm
from tests.model.transformers_logits import BATCH, LENGTH, their_logits
from tests.parameters import first_state
from tests.small import small_config, small_layout

STEPPED = [
    'gpt2',
    'llama one key head, tied',
    'nanochat',
    'olmo2',
    'gemma2',
    'mixtral',
    'starcoder2',
    'deepseek_v2',
    'deepseek_v3',
    'gpt_oss',
    *(
        pytest.param(name, marks=pytest.mark.nightly)
        for name in (
            'neox half rotary',
            'llama llama3',
            'mistral sliding',
            'qwen3 mixed, yarn',
            'qwen2 sliding from layer 1, tied',
            'smollm3 untied, biases',
            'olmo3 yarn',
            'granite tied, biases',
            'phi3 sliding, partial',
            'gemma3 linear, soft',
            'qwen3_moe',
        )
    ),
]
# Some gradients are zero except for rounding (key bias). Without a large epsilon, Adam's first step would be their
# sign.
OPTIMIZER = {
    'optimizer__learning_rate': 1e-2,
    'optimizer__warmup_steps': 0,
    'optimizer__schedule': 'constant',
    'optimizer__eps': 1e-4,
    'optimizer__weight_decay': 0.5,
    'optimizer__max_grad_norm': 1.0,
    'train__load_balancing_loss': 0.0,
    'train__router_bias_rate': 0.0,
}


def their_step(model, batch, config):
    """Returns the loss, and parameters by name after one clipped AdamW step with decay on matrices.

    Biases of experts, which have an axis for the experts, are not matrices.
    """
    scores = their_logits(model, batch, config)
    targets, weights = torch.from_numpy(batch['targets']).long(), torch.from_numpy(batch['weights'])
    losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction='none')
    loss = (losses * weights.flatten()).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    groups = [
        {'params': [parameter], 'weight_decay': 0.5 if parameter.ndim > 1 and not name.endswith('bias') else 0.0}
        for name, parameter in model.named_parameters()
    ]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4).step()
    return loss.item(), {name: tensor.detach().numpy() for name, tensor in state_in_file(model).items()}


@pytest.mark.parametrize('name', STEPPED)
def test_loss_and_a_step_of_adamw_agree(name):
    model = make_model(CASES[name])
    model_config, params = to_maxlm(model)
    before = from_maxlm(model.config.model_type, model_config, params)
    config = small_config(data__seq_len=LENGTH, train__global_batch_size=3, **OPTIMIZER)
    config = dataclasses.replace(config, model=model_config)
    layout = small_layout(config)
    state = first_state(config, layout)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    state = state._replace(params=params)
    state, metrics = jax.jit(make_train_step(config, layout))(state, layout.put_batch(BATCH, 3))

    loss, theirs = their_step(model, BATCH, model_config)
    assert float(metrics['loss']) == pytest.approx(loss, abs=1e-5)
    for tensor, array in from_maxlm(model.config.model_type, model_config, state.params).items():
        np.testing.assert_allclose(array, theirs[tensor], atol=1e-5, err_msg=tensor)
        # Negative control: the step is a hundred times larger than the tolerance. The bias that balances loads has no
        # gradient.
        assert np.abs(array - before[tensor]).max() > 1e-3 or tensor.endswith('e_score_correction_bias'), tensor
