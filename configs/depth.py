"""nanochat models scaled by depth: depth N has width 64 · N and head dimension 128.

Odd depths have the next multiple of 128 as width, in the recipe of 2025 only for their heads. The remaining settings
follow from the depth. Depth 24 has 0.68B parameters in its blocks, depth 64 has 12.9B. The set-up that this config
reproduces states 4.3B for depth 64, but 64 layers × 12 · 4096² is 12.9B; 4.3B corresponds to about depth 44.

Command:   maxlm recipe --config=configs/depth.py:64 text=TEXT core=BUNDLE
           prepares TEXT with one token per character, trains in runs/depth-64, reports CORE with the tasks in BUNDLE,
           a directory, a URL or hf:DATASET (docs/evaluation.md), and the bits per byte of the validation data, and
           exports the model
Variants:  any positive integer, e.g. :4 for a trial on a CPU, :24, :64; with -2025 the recipe of October 2025, e.g.
           :24-2025, :64-2025; 2025 and 2026: the recipe at depth 24; smoke: 10 steps of a narrow model
Hardware:  8 × H100 80 GB; a step of depth 64 is 8 GPUs × 4 sequences × 2048 tokens × 8 accumulation steps = 524,288
           tokens. The published product of 65,536 tokens leaves out the accumulation steps.
Time:      depth 64: 31 hours, as published; the number of steps follows the measured speed. Other depths: 12 tokens per
           parameter of the blocks' matrices and the head, 8.8 billion for depth 24; nanochat's speedrun has 8:
           --config.train.num_tokens=5840000000. 2025: 20 tokens per block parameter (Hoffmann et al. 2022)
Cost:      depth 64: $1,000 at $4.03 per GPU and hour; --config.train.price_per_hour=X for the price of another provider
Memory:    compiled ahead of time for 8 × H100, recipe of 2025: 23 GiB per GPU at depth 24, 51 GiB at depth 64
Expected:  published: about 34 epochs over the data, lowest validation loss at step 2000 to 5000; the best checkpoint is
           kept. Speed and loss of maxlm are not measured yet

Model, optimizer and scaling rules are those of nanochat in July 2026 (Karpathy 2025–2026, scripts/base_train.py).
"""

import math
import shlex
from pathlib import Path

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.config.smoke import shrink
from maxlm.errors import InputError

# Recipes. A year without a depth is that of depth 24, not a number of layers.
YEARS = ('2025', '2026')
HEAD_DIM = 128
PUBLISHED_DEPTH = 64
SEQ_LEN = 2048
# Depth, width and batch in tokens at which nanochat tuned its learning rates and weight decay.
TUNED_DEPTH, TUNED_DIM, TUNED_BATCH = 12, 768, 2**19
# Tokens per parameter of the blocks' matrices and the head, from nanochat's fits of scaling laws.
TOKENS_PER_PARAMETER = 12
# The size of nanochat's vocabulary. The rules count the parameters of the head with it, so that they depend on the
# depth alone.
VOCAB_SIZE = 2**15
TRIAL_BUNDLE = Path(__file__).resolve().parent / 'core_trial'


def get_phases(variant: str = '24') -> list[str]:
    data, run = f'data/depth-{variant}', f'runs/depth-{variant}'
    # CORE needs a bundle, which a trial replaces by twelve questions.
    core = shlex.quote(str(TRIAL_BUNDLE)) if variant == 'smoke' else '{core:eval_bundle}'
    phases = [
        f'prepare --input {{text}} --output {data} --tokenizer {{tokenizer:chars}}',
        f'train --config={{config}}:{variant}',
        f'evaluate --checkpoint={run} --data={data} --tasks=core:{core} --output={run}/evaluation',
        f'report {run}',
    ]
    if variant.endswith('2025'):
        return phases
    # Transformers cannot express the model of 2026.
    return [*phases, f'hf export-nanochat --checkpoint {run} --output {run}/nanochat']


def get_config(variant: str = '24') -> ConfigDict:
    if variant == 'smoke':
        config = shrink(get_config('2'))
        # nanochat's windows have 128 tokens or more, as these sequences. It has this ratio of widths only.
        config.model.attention_pattern, config.model.sliding_window = 'L', 0
        config.model.ffn_dim = 4 * config.model.dim
        config.data.path = 'data/depth-smoke'
        return config
    depth, dash, year = (f'24-{variant}' if variant in YEARS else variant).partition('-')
    if not (depth.isascii() and depth.isdigit() and int(depth) > 0) or (dash and year not in YEARS):
        raise InputError(
            f'configs/depth.py:{variant} needs a whole number of layers, e.g. configs/depth.py:24 or '
            'configs/depth.py:24-2025'
        )
    config = _shared(int(depth))
    config.data.path = f'data/depth-{variant}'
    if year == '2025':
        _set_recipe_of_2025(config)
    else:
        _set_recipe_of_2026(config)
    return config


def _width(num_layers: int) -> int:
    """Returns the width of a depth, a multiple of the head dimension."""
    return -(-64 * num_layers // HEAD_DIM) * HEAD_DIM


def _shared(num_layers: int) -> ConfigDict:
    """Returns what both recipes share."""
    dim = _width(num_layers)
    config = default()

    config.model.family = 'nanochat'
    config.model.num_layers = num_layers
    config.model.dim = dim
    config.model.head_dim = HEAD_DIM
    config.model.num_heads = dim // HEAD_DIM
    config.model.ffn_dim = 4 * dim
    # Compiled for 8 × H100: at depth 24, unrolled layers without rematerialization are the fastest. Depth 64 only fits
    # with rematerialization, which saves memory only in a loop over the layers.
    is_small = num_layers <= 32
    config.model.remat_policy = 'none' if is_small else 'full'
    config.model.scan_layers = not is_small
    # Gathers parameters once per step.
    config.mesh.zero_stage = 2

    config.data.seq_len = SEQ_LEN

    if num_layers == PUBLISHED_DEPTH:
        config.train.hours = 31.0
        config.train.price_per_hour = 4.03
    config.train.per_device_batch_size = 8 if is_small else 4

    config.eval.interval = 250
    config.eval.num_batches = 4
    config.eval.num_samples = 4

    config.optimizer.name = 'muon'
    config.optimizer.beta1 = 0.8
    config.optimizer.beta2 = 0.95
    config.optimizer.eps = 1e-10
    config.optimizer.schedule = 'wsd'

    # Alerts below the published minimum of a healthy run.
    config.alerts.min_utilization = 80.0
    config.alerts.min_mfu = 0.15
    config.alerts.min_tokens_per_second = 30_000.0

    # The published interval, an hour; in addition, maxlm saves at least every 20 minutes.
    config.checkpoint.save_interval_steps = 730
    config.checkpoint.max_to_keep = 3
    return config


def _set_recipe_of_2025(config: ConfigDict) -> None:
    num_layers = config.model.num_layers
    config.model.dim = dim = 64 * num_layers
    config.model.ffn_dim = 4 * dim
    if num_layers != PUBLISHED_DEPTH:
        config.train.num_tokens = 20 * 12 * num_layers * dim**2
    config.train.global_batch_size = 256

    config.optimizer.learning_rate = 0.02
    # Adam's updates do not shrink with the width, so the learning rates are scaled.
    scale = (dim / TUNED_DIM) ** -0.5
    config.optimizer.adam_learning_rate = 0.004 * scale
    config.optimizer.embedding_learning_rate = 0.2 * scale
    config.optimizer.muon_momentum_warmup_steps = 300
    config.optimizer.weight_decay = 0.0
    config.optimizer.wsd_decay_fraction = 0.2
    config.optimizer.max_grad_norm = 1.0
    config.export.at_end = True
    config.export.architecture = 'nanochat'


def _set_recipe_of_2026(config: ConfigDict) -> None:
    model, optimizer = config.model, config.optimizer
    num_layers, dim = model.num_layers, model.dim

    model.init = 'uniform_2026'
    model.norm_epsilon = 2.0**-23
    model.rope_theta = 100_000.0
    # Queries and keys are multiplied by 1.2 after their norms.
    model.relative_attention_multiplier = 1.44
    # Three of four layers attend to a quarter of the context, in multiples of 128 tokens, and to the own token. The
    # last layer attends to everything.
    model.attention_pattern = ('SSSL' * num_layers)[: num_layers - 1] + 'L' if num_layers % 4 else 'SSSL'
    model.sliding_window = -(-SEQ_LEN // 4 // 128) * 128 + 1 if num_layers > 1 else 0
    model.value_embedding_pattern = 'NV' if num_layers > 1 else 'V'
    model.value_gate_channels = 12
    model.residual_scale = True
    model.embedding_residual = True
    model.smear_channels = 24
    model.backout_layer = num_layers // 2
    # nanochat's attention crosses documents. Its rows begin at documents: --config.data.rows=documents. In characters,
    # most documents are longer than a row, of which such rows would lose the rest.
    config.data.document_mask = False

    # Compute-optimal tokens, relative to those of the depth at which the learning rates were tuned.
    num_tokens = TOKENS_PER_PARAMETER * _scaling_parameters(num_layers)
    horizon = num_tokens / (TOKENS_PER_PARAMETER * _scaling_parameters(TUNED_DEPTH))
    # The best batch grows with tokens^0.383 (Bergsma et al. 2025, "Power Lines"); here to a power of two.
    batch = 2 ** round(math.log2(TUNED_BATCH * horizon**0.383))
    if num_layers == PUBLISHED_DEPTH:
        batch = TUNED_BATCH
    else:
        config.train.num_tokens = num_tokens
    config.train.global_batch_size = batch // SEQ_LEN

    # The noise of Adam's updates grows with the root of the batch; nanochat applies the rule to Muon as well.
    batch_scale = (batch / TUNED_BATCH) ** 0.5
    scale = (dim / TUNED_DIM) ** -0.5 * batch_scale
    optimizer.learning_rate = 0.02 * batch_scale
    optimizer.adam_learning_rate = 0.008 * scale
    optimizer.embedding_learning_rate = 0.3 * scale
    # Only the decay of matrices is cautious and ends with the run.
    plain = 'cautious_decay=False', 'weight_decay_schedule=constant'
    optimizer.groups = (
        ('head.*', 'beta2=0.96', 'weight_decay=0.01', *plain),
        ('embedding', 'beta2=0.995', 'weight_decay=0.001', *plain),
        ('value_embeddings', f'learning_rate={0.15 * scale!r}', 'beta2=0.995', 'weight_decay=0.01', *plain),
        ('residual_scales', f'learning_rate={0.005 * batch_scale!r}', 'weight_decay=0.05', *plain),
        ('embedding_scales', f'learning_rate={0.5 * batch_scale!r}', 'beta1=0.96'),
        # Not scaled with the batch.
        ('smear_*', 'learning_rate=0.2'),
        ('backout_scale', 'learning_rate=0.2'),
    )
    if num_layers <= 2:
        # The output that is subtracted is that of the last layer, so its scale has no effect after the final norm. Adam
        # would amplify the rounding errors of its gradient until the scale exceeds 1 and reverses the output.
        optimizer.groups = optimizer.groups[:-1]
        optimizer.frozen_params = ('backout_scale',)
    optimizer.muon_coefficients = 'polar_express'
    optimizer.muon_row_equilibration = True
    optimizer.muon_renormalize = True
    optimizer.muon_beta2 = 0.9
    optimizer.muon_momentum = 0.97
    optimizer.muon_momentum_warmup_steps = 400
    optimizer.muon_final_momentum = 0.9
    # The time over which weights are forgotten stays a constant fraction of the run (Wang & Aitchison 2024,
    # arXiv 2405.13698).
    optimizer.weight_decay = 0.28 * batch_scale / horizon
    optimizer.weight_decay_schedule = 'cosine'
    optimizer.muon_scaled_decay = True
    optimizer.cautious_decay = True
    optimizer.warmup_steps = 40
    optimizer.wsd_decay_fraction = 0.65
    optimizer.min_learning_rate = 0.05 * optimizer.learning_rate
    optimizer.max_grad_norm = 0.0


def _scaling_parameters(num_layers: int) -> int:
    """Returns the number of parameters of the blocks' matrices and the head."""
    dim = _width(num_layers)
    return 12 * num_layers * dim**2 + VOCAB_SIZE * dim
