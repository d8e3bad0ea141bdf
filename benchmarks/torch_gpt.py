"""A plain, optimized GPT-2 in PyTorch for comparisons of step times, independent of maxlm.

Pre-norm blocks with biases, learned positions, fused query-key-value projection, `scaled_dot_product_attention`, GELU,
tied head; AdamW in one fused kernel, cosine schedule after a warm-up, clipped gradients. Parameters have the names and
layouts of Transformers' GPT-2 (its `Conv1D` kernels are [in, out]), so that one set of weights fits both.

Shapes: B batch, T length, D dim, N heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from maxlm.config.schema import Config
from maxlm.config.sections.optimizer import OptimizerConfig


class Projection(nn.Module):
    """Linear layer y = x · weight + bias."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.empty(num_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.c_attn = Projection(dim, 3 * dim)
        self.c_proj = Projection(dim, dim)
        self.num_heads = num_heads

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (part.view(B, T, self.num_heads, -1).transpose(1, 2) for part in self.c_attn(x_BTD).split(D, dim=2))
        o_BNTH = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(o_BNTH.transpose(1, 2).reshape(B, T, D))


class FeedForward(nn.Module):
    """Feed-forward layer of width 4 · dim."""

    def __init__(self, dim: int):
        super().__init__()
        self.c_fc = Projection(dim, 4 * dim)
        self.c_proj = Projection(4 * dim, dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x_BTD), approximate='tanh'))


class Block(nn.Module):
    """Transformer block: attention, then feed-forward."""

    def __init__(self, dim: int, num_heads: int, epsilon: float):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim, eps=epsilon)
        self.attn = Attention(dim, num_heads)
        self.ln_2 = nn.LayerNorm(dim, eps=epsilon)
        self.mlp = FeedForward(dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD))
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class Body(nn.Module):
    """Maps token ids to hidden states [B, T, D] after the last norm."""

    def __init__(self, config: Config):
        super().__init__()
        model = config.model
        self.wte = nn.Embedding(model.vocab_size, model.dim)
        self.wpe = nn.Embedding(model.max_positions, model.dim)
        blocks = (Block(model.dim, model.num_heads, model.norm_epsilon) for _ in range(model.num_layers))
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(model.dim, eps=model.norm_epsilon)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.wte(tokens_BT) + self.wpe(positions)
        if torch.is_autocast_enabled(x_BTD.device.type):
            # Autocast would keep the residual stream in float32, with twice the memory traffic.
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        for block in self.h:
            x_BTD = block(x_BTD)
        return self.ln_f(x_BTD)


class GPT(nn.Module):
    """Maps token ids and targets to the mean loss."""

    def __init__(self, config: Config):
        super().__init__()
        self.transformer = Body(config)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV = functional.linear(self.transformer(tokens_BT), self.transformer.wte.weight)
        return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def load_weights(model: nn.Module, tensors: Mapping[str, np.ndarray]) -> None:
    """Copies tensors with Transformers' names into a model; missing or unexpected tensors are errors."""
    state = {name: torch.from_numpy(np.array(value)) for name, value in tensors.items()}
    # The head is tied to the embedding.
    if 'lm_head.weight' in model.state_dict():
        state['lm_head.weight'] = state['transformer.wte.weight']
    model.load_state_dict(state)


def make_step(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    model: nn.Module,
    config: Config,
    *,
    autocast: torch.dtype | None = None,
    attention: SDPBackend | None = None,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function that computes loss and gradients, clips, applies AdamW and returns the loss on the device.

    Args:
        loss_of: maps tokens and targets to the mean loss, compiled or not.
        model: model that contains the parameters of `loss_of`.
        config: config with the optimizer settings.
        autocast: dtype of the computation; None uses the dtype of the parameters.
        attention: required attention kernel; PyTorch raises an error if it is unavailable. None lets PyTorch choose.
    """
    optimizer = config.optimizer
    decayed = [param for param in model.parameters() if param.ndim >= 2]
    rest = [param for param in model.parameters() if param.ndim < 2]
    groups: list[dict[str, Any]] = [
        {'params': decayed, 'weight_decay': optimizer.weight_decay},
        {'params': rest, 'weight_decay': 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups,
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: _rate(optimizer, config.train.num_steps, step))
    device = next(model.parameters()).device.type

    def step(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        only = sdpa_kernel(attention) if attention is not None else contextlib.nullcontext()
        with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None), only:
            loss = loss_of(tokens_BT, targets_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        schedule.step()
        return loss.detach()

    return step


def _rate(optimizer: OptimizerConfig, num_steps: int, step: int) -> float:
    """Returns the fraction of the peak learning rate at a step (from 0): linear warm-up, then cosine decay."""
    if step < optimizer.warmup_steps:
        return step / optimizer.warmup_steps
    done = (step - optimizer.warmup_steps) / max(1, num_steps - optimizer.warmup_steps)
    floor = optimizer.min_learning_rate / optimizer.learning_rate
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
