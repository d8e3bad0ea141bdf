"""nanochat models scaled by depth: depth N has width 64 · N and head dimension 128.

The remaining settings follow from the depth. Depth 24 has 0.68B parameters, depth 64 has 12.9B. The set-up that this
config reproduces states 4.3B for depth 64, but 64 layers × 12 · 4096² is 12.9B; 4.3B corresponds to about depth 44.

Command:   python -m maxlm.train --config=configs/depth.py:24 --workdir=runs/d24
Variants:  any positive integer, e.g. :4 for a trial on a CPU, :24, :64
Data:      python -m maxlm.prepare --input TEXT… --output data --tokenizer chars
Hardware:  8 × H100 80 GB, up to depth 64 with 4 sequences of 2048 tokens per GPU
Time:      20 tokens per block parameter (Hoffmann et al. 2022): 13.6 billion for depth 24, 258 billion for depth 64;
           --config.train.num_steps=N sets another length
Memory:    compiled ahead of time for 8 × H100: 25 GiB per GPU at depth 24, 51 GiB at depth 64
Expected:  speed and loss are not measured yet

Muon and AdamW use the learning rates of nanochat (Karpathy 2025), which were tuned at width 768.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

HEAD_DIM = 128


def get_config(depth: str = '24') -> ConfigDict:
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

    config.data.seq_len = 2048

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

    config.checkpoint.save_interval_steps = 1000
    config.checkpoint.max_to_keep = 3
    return config
