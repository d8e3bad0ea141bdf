"""Llama models from 84M to 1.48B parameters for 8 × A100, in the sizes of a published series.

Command:   python -m maxlm.train --config=configs/mix.py:xlarge --workdir=runs/xlarge
Variants:  tiny · small · medium · medium-large · large · xlarge
Data:      python -m maxlm.prepare --input TEXT… --output data --tokenizer bpe:32000
Hardware:  8 × A100; tiny and small on one GPU, or for a trial on a CPU
Time:      11 billion tokens; at the published 79 200 tokens/s of xlarge 39 hours
Memory:    compiled ahead of time for H100: xlarge 55 GiB on one, 27 GiB on each of 8; small 19 GiB on one, tiny 11
Expected:  speed and loss are not measured yet

Of the published sizes only that of xlarge comes with dimensions, 32 layers × 1920. With a vocabulary of 32 000, tied,
they give 1.48B, not 1.46B; the other shapes are chosen to come within 1 % of the published figures.
"""

from ml_collections import ConfigDict

from maxlm.config.load import default
from maxlm.errors import InputError

# variant → (layers, width, heads, inner width of the feed-forward, peak learning rate)
SHAPES = {
    'tiny': (12, 640, 10, 1920, 6e-4),
    'small': (16, 896, 14, 2304, 6e-4),
    'medium': (20, 1152, 18, 3328, 3e-4),
    'medium-large': (18, 1280, 20, 3456, 3e-4),
    'large': (24, 1536, 12, 4352, 2.5e-4),
    'xlarge': (32, 1920, 15, 5120, 2e-4),
}
TOKENS_PER_STEP = 2**19


def get_config(variant: str = 'xlarge') -> ConfigDict:
    if variant not in SHAPES:
        raise InputError(f'configs/mix.py has no variant {variant!r}; there are: {", ".join(SHAPES)}')
    num_layers, dim, num_heads, ffn_dim, learning_rate = SHAPES[variant]
    config = default()

    config.model.family = 'llama'
    config.model.vocab_size = 32_000
    config.model.num_layers = num_layers
    config.model.dim = dim
    config.model.num_heads = num_heads
    config.model.ffn_dim = ffn_dim
    config.model.tie_embeddings = True
    config.model.remat = 'none' if dim < 1500 else 'dots_no_batch'

    config.data.window = 2048

    config.train.num_tokens = 11_000_000_000
    config.train.global_batch_tokens = TOKENS_PER_STEP
    config.train.micro_batch = 8

    config.eval.every = 500
    config.eval.num_batches = 4
    config.eval.samples = 4

    config.optimizer.learning_rate = learning_rate
    config.optimizer.min_learning_rate = learning_rate / 10
    config.optimizer.warmup_tokens = 200 * TOKENS_PER_STEP
    config.optimizer.clip_norm = 1.0

    config.checkpoint.every_steps = 500
    config.checkpoint.keep_last = 3
    return config
