"""The training step of nanochat (github.com/karpathy/nanochat), whose source is a directory on this machine.

nanochat trains another architecture: rotary positions, squared ReLU, no biases, an untied head, value embeddings and
Muon. With equal width, depth and vocabulary, its matrix products are those of a GPT-2. Only its throughput can be
compared. All layers attend to the whole sequence, as a GPT-2 does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from maxlm.config.schema import Config
from maxlm.errors import InputError


class Nanochat(NamedTuple):
    """The model on its device, its step, and the numbers of all parameters and of those in matrix products.

    `step` maps tokens and targets to the loss on the device.
    """

    step: Callable[[Any, Any], Any]
    parameters: int
    matrix_parameters: int


def nanochat_classes(folder: str) -> tuple[Any, Any]:
    """Imports nanochat's model and the class of its config from the directory that contains its package.

    Raises:
        InputError: the directory has no package of nanochat, or a package that it needs is not installed.
    """
    # nanochat would compute in float32 on a CPU. The choice is made when its package is imported.
    os.environ.setdefault('NANOCHAT_DTYPE', 'bfloat16')
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module('nanochat.gpt')
    except ImportError as error:
        raise InputError(f'--nanochat={folder}: {error}; give the directory that contains nanochat/gpt.py') from error
    return module.GPT, module.GPTConfig


def make_nanochat(classes: tuple[Any, Any], config: Config, device: str, compiled: Callable[[Any], Any]) -> Nanochat:
    """Initializes a model of the shape of a config, with the optimizer of nanochat's own script.

    Args:
        classes: result of `nanochat_classes`.
        config: resolved config with the shape of the model.
        device: device of PyTorch.
        compiled: `torch.compile` with its options, or the identity.
    """
    import torch

    gpt, gpt_config = classes
    model = config.model
    shape = gpt_config(
        sequence_len=config.data.seq_len,
        vocab_size=model.vocab_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_kv_head=model.num_heads,
        n_embd=model.dim,
        window_pattern='L',
    )
    with torch.device('meta'):
        network = gpt(shape)
    network.to_empty(device=device)
    network.init_weights()
    optimizer = network.setup_optimizer()
    loss_of = compiled(network)

    def step(tokens_BT: Any, targets_BT: Any) -> Any:
        loss = loss_of(tokens_BT, targets_BT)
        loss.backward()
        optimizer.step()
        network.zero_grad(set_to_none=True)
        return loss.detach()

    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Nanochat(step, parameters, network.num_matmul_params())
