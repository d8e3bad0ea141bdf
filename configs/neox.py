"""GPT-NeoX with 1.41B parameters ("1.2B" without embeddings): width 2048, 24 layers, 16 heads, 25 % rotary dimensions.

Shape, learning rate, warm-up fraction and gradient clipping are those of Pythia-1.4B (Biderman et al. 2023). The
vocabulary has 50 257 tokens.

Command:   python -m maxlm.train --config=configs/neox.py:production_8gpu --workdir=runs/neox
Variants:  test              a laptop CPU: 4 layers of width 256, 50 steps of 8 × 256 tokens
           production        one GPU with 80 GB, 0.26M tokens per step
           production_24gb   two GPUs with 24 GB, such as RTX 4090, 0.26M tokens per step
           production_8gpu   8 GPUs with 80 GB in one node, 2.1M tokens per step
           --config.train.num_steps=N sets another number of steps
Data:      python -m maxlm.prepare --input TEXT… --output data --tokenizer bpe:50257
Hardware:  as above; any number of devices that divides the batch gives the same results
Time:      test: one minute; production and production_24gb: 20 000 steps, 5.2 billion tokens;
           production_8gpu: 14 000 steps, 29 billion
Memory:    compiled ahead of time: 51 GiB on one H100, 33 GiB on each of 8, 18 GiB on each of two RTX 4090
Expected:  speed and loss are not measured yet
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

# variant → (steps, sequences per step, sequences per device at a time, peak learning rate)
VARIANTS = {
    'test': (50, 8, 0, 1e-3),
    'production': (20_000, 128, 8, 2e-4),
    'production_24gb': (20_000, 128, 2, 2e-4),
    'production_8gpu': (14_000, 1024, 8, 2e-4),
}


def get_config(variant: str = 'production_8gpu') -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/neox.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    num_steps, global_batch, micro_batch, learning_rate = VARIANTS[variant]
    config = default()

    config.model.family = 'gpt_neox'
    if variant == 'test':
        config.model.num_layers = 4
        config.model.dim = 256
        config.model.num_heads = 4
        config.model.dtype = 'float32'  # two CPU cores are slower in bfloat16
    else:
        config.model.vocab_size = 50_257
        config.model.num_layers = 24
        config.model.dim = 2048
        config.model.num_heads = 16
        config.model.ffn_dim = 8192
        # The fastest compiled programs that fit; on H100, 'dots_no_batch' is 7 % slower than 'none'.
        config.model.remat_policy = 'dots_no_batch' if variant == 'production_24gb' else 'none'
        config.model.scan_layers = False
        # ZeRO-2 gathers parameters once per step; 24 GB are too small for a copy of all parameters.
        config.mesh.zero_stage = 3 if variant == 'production_24gb' else 2

    config.data.seq_len = 256 if variant == 'test' else 2048

    config.train.num_steps = num_steps
    config.train.global_batch_size = global_batch
    config.train.per_device_batch_size = micro_batch

    config.eval.interval = max(25, num_steps // 100)
    config.eval.num_batches = 4
    config.eval.num_samples = 4

    config.optimizer.learning_rate = learning_rate
    config.optimizer.min_learning_rate = learning_rate / 10
    config.optimizer.warmup_steps = num_steps // 100
    config.optimizer.max_grad_norm = 1.0

    config.checkpoint.save_interval_steps = 1000
    config.checkpoint.max_to_keep = 5
    return config
