"""nanochat models scaled by depth: depth N has width 64 · N and head dimension 128.

The remaining settings follow from the depth. Depth 24 has 0.68B parameters, depth 64 has 12.9B. The set-up that this
config reproduces states 4.3B for depth 64, but 64 layers × 12 · 4096² is 12.9B; 4.3B corresponds to about depth 44.

Command:   maxlm recipe --config=configs/depth.py:64 text=TEXT
           prepares TEXT with one token per character, trains in runs/depth-64 and exports the model
Variants:  any positive integer, e.g. :4 for a trial on a CPU, :24, :64; smoke: 10 steps of a narrow model
Hardware:  8 × H100 80 GB; a step is 8 GPUs × 4 sequences × 2048 tokens × 8 accumulation steps = 524,288 tokens. The
           published product of 65,536 tokens leaves out the accumulation steps.
Time:      depth 64: 31 hours, as published; the number of steps follows the measured speed. Other depths: 20 tokens per
           block parameter (Hoffmann et al. 2022), 13.6 billion for depth 24
Cost:      depth 64: $1,000 at $4.03 per GPU and hour; --config.train.price_per_hour=X for the price of another provider
Memory:    compiled ahead of time for 8 × H100: 25 GiB per GPU at depth 24, 51 GiB at depth 64
Expected:  published: about 34 epochs over the data, lowest validation loss at step 2000 to 5000; the best checkpoint is
           kept. Speed and loss of maxlm are not measured yet

Muon and AdamW use the learning rates of nanochat (Karpathy 2025), which were tuned at width 768.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.config.smoke import shrink
from maxlm.errors import InputError

HEAD_DIM = 128
PUBLISHED_DEPTH = 64


def get_phases(depth: str = '24') -> list[str]:
    return [
        f'prepare --input {{text}} --output data/depth-{depth} --tokenizer {{tokenizer:chars}}',
        f'train --config={{config}}:{depth}',
    ]


def get_config(depth: str = '24') -> ConfigDict:
    if depth == 'smoke':
        config = shrink(get_config('2'))
        config.data.path = 'data/depth-smoke'
        return config
    if not (depth.isascii() and depth.isdigit() and int(depth) > 0):
        raise InputError(f'configs/depth.py:{depth} needs a whole number of layers, e.g. configs/depth.py:24')
    num_layers = int(depth)
    dim = 64 * num_layers
    config = default()

    config.model.family = 'nanochat'
    config.model.num_layers = num_layers
    config.model.dim = dim
    config.model.head_dim = HEAD_DIM
    config.model.num_heads = -(-dim // HEAD_DIM)
    config.model.ffn_dim = 4 * dim
    # Compiled for 8 × H100: at depth 24, unrolled layers without rematerialization are the fastest. Depth 64 only fits
    # with rematerialization, which saves memory only in a loop over the layers.
    is_small = num_layers <= 32
    config.model.remat_policy = 'none' if is_small else 'full'
    config.model.scan_layers = not is_small
    # Gathers parameters once per step.
    config.mesh.zero_stage = 2

    config.data.path = f'data/depth-{depth}'
    config.data.seq_len = 2048

    if num_layers == PUBLISHED_DEPTH:
        config.train.hours = 31.0
        config.train.price_per_hour = 4.03
    else:
        config.train.num_tokens = 20 * 12 * num_layers * dim**2
    config.train.global_batch_size = 256
    config.train.per_device_batch_size = 8 if is_small else 4

    config.eval.interval = 250
    config.eval.num_batches = 4
    config.eval.num_samples = 4

    config.optimizer.name = 'muon'
    config.optimizer.learning_rate = 0.02
    # Adam's updates do not shrink with the width, so the learning rates are scaled.
    scale = (dim / 768) ** -0.5
    config.optimizer.adam_learning_rate = 0.004 * scale
    config.optimizer.embedding_learning_rate = 0.2 * scale
    config.optimizer.beta1 = 0.8
    config.optimizer.beta2 = 0.95
    config.optimizer.eps = 1e-10
    config.optimizer.muon_momentum_warmup_steps = 300
    config.optimizer.weight_decay = 0.0
    config.optimizer.schedule = 'wsd'
    config.optimizer.wsd_decay_fraction = 0.2
    config.optimizer.max_grad_norm = 1.0

    # Alerts below the published minimum of a healthy run.
    config.alerts.min_utilization = 80.0
    config.alerts.min_mfu = 0.15
    config.alerts.min_tokens_per_second = 30_000.0

    # The published interval, an hour; in addition, maxlm saves at least every 20 minutes.
    config.checkpoint.save_interval_steps = 730
    config.checkpoint.max_to_keep = 3
    config.export.at_end = True
    config.export.architecture = 'nanochat'
    return config
