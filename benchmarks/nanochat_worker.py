"""Trains nanochat's own code on given rows, for `benchmarks.nanochat_peer`: a process with PyTorch.

The command line is a JSON object with the fields of `Job`. The model and its optimizer are imported from nanochat's
source. The training loop follows `scripts/base_train.py`. `recipe='2025'` removes what nanochat gained after October
2025: its initial values stay, and the additional parameters are constants that have no effect.

Shapes: V vocabulary, D width, F feed-forward width.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch

# Text of gpt.py that changes for 2025: the factor of queries and keys, and the base of the rotary embedding.
CHANGES_2025 = (('q = q * 1.2', 'q = q * 1.0'), ('k = k * 1.2', 'k = k * 1.0'), ('base=100000', 'base=10000'))
# Parameters added since. A value embedding of 0 has no effect, whatever its gate.
NEUTRAL = {'resid_lambdas': 1.0, 'x0_lambdas': 0.0, 'smear_lambda': 0.0, 'backout_lambda': 0.0, 'value_embeds': 0.0}


class Job(NamedTuple):
    """Settings of a run.

    Attributes:
        source: directory that contains the package `nanochat`.
        rows: file of `nanochat_rows.write_rows`.
        output: file to write.
        recipe: '2026' (nanochat's present) or '2025'.
        seed: seed of the initial values.
        steps, batch, layers, width, heads: sizes.
        evaluate_every: steps between evaluations; 0 = none.
        trace: steps whose parameters are written, instead of bits per byte; () = none. The initial values of '2026' are
            then not 0: with zeros, some gradients are only rounding errors, which Adam amplifies.
    """

    source: str
    rows: str
    output: str
    recipe: str
    seed: int
    steps: int
    batch: int
    layers: int
    width: int
    heads: int
    evaluate_every: int = 0
    trace: tuple[int, ...] = ()


def main(job: Job) -> None:
    """Trains, and writes the bits per byte of each evaluation, or the trace."""
    rows = np.load(job.rows)
    model, optimizer = make_model(job, len(rows['token_bytes']))
    curve: dict[int, float] = {}
    trace: dict[str, Any] = {}
    losses = []
    for step in range(job.steps):
        if step in job.trace:
            trace |= {f'{step}/{name}': param.detach().numpy().copy() for name, param in model.named_parameters()}
        batch = torch.from_numpy(rows['documents'][step * job.batch : (step + 1) * job.batch].astype(np.int64))
        loss = model(batch[:, :-1], batch[:, 1:].contiguous())
        loss.backward()
        schedule(job, step, optimizer, model)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if job.evaluate_every and (step + 1) % job.evaluate_every == 0:
            curve[step + 1] = bits_per_byte(model, rows)
            print(f'nanochat {job.recipe} seed {job.seed} step {step + 1}: {curve[step + 1]:.4f}', file=sys.stderr)
    if job.trace:
        trace |= {f'{job.steps}/{name}': param.detach().numpy() for name, param in model.named_parameters()}
        np.savez(job.output, losses=np.array(losses), **trace)
    else:
        Path(job.output).write_text(json.dumps({'bits_per_byte': curve, 'torch': torch.__version__}))


def make_model(job: Job, vocabulary: int) -> tuple[Any, Any]:
    """Returns the initial model and its optimizer."""
    sys.path.insert(0, job.source)
    gpt, optim = _load_gpt(job), cast(Any, importlib.import_module('nanochat.optim'))
    torch.manual_seed(job.seed)
    config = gpt.GPTConfig(
        sequence_len=256,
        vocab_size=vocabulary,
        n_layer=job.layers,
        n_head=job.heads,
        n_kv_head=job.heads,
        n_embd=job.width,
        window_pattern='L',
    )
    model = gpt.GPT(config)
    model.init_weights()
    if job.recipe == '2026':
        if job.trace:
            with torch.no_grad():
                for name, param in model.named_parameters():
                    if 'c_proj' in name or 've_gate' in name:
                        param.normal_(0, 0.1)
                    elif name in ('smear_lambda', 'backout_lambda'):
                        param.fill_(0.4)
        # Rates and decay of base_train.py at its reference batch; see `schedule` for the decay.
        return model, model.setup_optimizer(0.008, 0.3, 0.02, weight_decay=0.28)
    for name, param in model.named_parameters():
        for prefix, value in NEUTRAL.items():
            if name.startswith(prefix):
                torch.nn.init.constant_(param, value)
        param.requires_grad_(not name.startswith((*NEUTRAL, 'smear')) and 've_gate' not in name)
    optim.muon_step_fused = muon_2024
    scale = (job.width / 768) ** -0.5
    matrices = [param for param in model.transformer.h.parameters() if param.requires_grad]
    adam = {'kind': 'adamw', 'betas': (0.8, 0.95), 'eps': 1e-10, 'weight_decay': 0.0}
    groups = [
        {**adam, 'params': [model.lm_head.weight], 'lr': 0.004 * scale},
        {**adam, 'params': [model.transformer.wte.weight], 'lr': 0.2 * scale},
        *(
            {
                'kind': 'muon',
                'params': [param for param in matrices if param.shape == shape],
                **{'lr': 0.02, 'momentum': 0.95, 'ns_steps': 5, 'beta2': 0.0, 'weight_decay': 0.0},
            }
            for shape in sorted({param.shape for param in matrices})
        ),
    ]
    optimizer = optim.MuonAdamW(groups)
    for group in optimizer.param_groups:
        group['initial_lr'] = group['lr']
    return model, optimizer


def schedule(job: Job, step: int, optimizer: Any, model: torch.nn.Module) -> None:
    """Sets the learning rates, Muon's momentum and its decay for a step, and clips the gradients for 2025."""
    steps = job.steps if not job.trace else 300
    if job.recipe == '2025':
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (steps - step) / round(0.2 * steps))
        momentum, decay = 0.85 + 0.1 * min(1.0, step / 300), 0.0
    else:
        falling = round(0.65 * steps)
        progress = (steps - step) / falling
        rate = (step + 1) / 40 if step < 40 else min(1.0, progress + (1 - progress) * 0.05)
        # The warm-up of the momentum comes before its decay.
        momentum = 0.85 + 0.12 * step / 400 if step < 400 else 0.9 + 0.07 * min(1.0, progress)
        decay = 0.28 * 0.5 * (1 + math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group['lr'] = group['initial_lr'] * rate
        if group['kind'] == 'muon':
            group['momentum'], group['weight_decay'] = momentum, decay


def muon_2024(
    stacked_grads: torch.Tensor,
    stacked_params: torch.Tensor,
    momentum_buffer: torch.Tensor,
    second_momentum_buffer: torch.Tensor,
    momentum_t: torch.Tensor,
    lr_t: torch.Tensor,
    *unused: Any,
) -> None:
    """Muon of Jordan et al. 2024, as nanochat used it in October 2025, but with matrix products in float32."""
    del second_momentum_buffer, unused
    momentum_buffer.lerp_(stacked_grads, 1 - momentum_t)
    x = stacked_grads.lerp_(momentum_buffer, momentum_t)
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    stacked_params.sub_(lr_t * (x.mT if is_tall else x))


@torch.no_grad()
def bits_per_byte(model: Any, rows: Any) -> float:
    """Returns the bits per byte of the validation rows, without the targets that are no text."""
    nats = 0.0
    for row in rows['validation'].astype(np.int64):
        tokens = torch.from_numpy(row)[None]
        losses = model(tokens[:, :-1], tokens[:, 1:], loss_reduction='none').view(-1)
        nats += float(losses[tokens[0, 1:] != int(rows['end'])].double().sum())
    return nats / math.log(2) / int(rows['token_bytes'][rows['validation'][:, 1:]].sum())


def _load_gpt(job: Job) -> ModuleType:
    """Imports nanochat's model, with the text of 2025 if the job asks for it."""
    module = importlib.import_module('nanochat.gpt')
    if job.recipe == '2025':
        path = Path(job.source) / 'nanochat' / 'gpt.py'
        text = path.read_text()
        for before, after in CHANGES_2025:
            assert text.count(before) == 1, f'{path} has changed: {before!r}'
            text = text.replace(before, after)
        exec(compile(text, str(path), 'exec'), vars(module))
    return module


if __name__ == '__main__':
    fields = json.loads(sys.argv[1])
    main(Job(**{**fields, 'trace': tuple(fields.get('trace', ()))}))
