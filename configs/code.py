"""Code models in the shapes of Llama and Code Llama, 6.7B to 69B parameters, context 4096.

Command:   python -m maxlm.train --config=configs/code.py:7b --workdir=runs/code-7b
Variants:  7b · 13b · 30b · 70b, which have 6.7, 13.0, 32.5 and 69.0 billion parameters
Data:      python -m maxlm.prepare --input CODE… --output data --tokenizer bpe:32016
Hardware:  H100 80 GB: 7b 8 and more, 13b 16, 30b 32, 70b 64; or as much memory in a TPU pod slice
Time:      200 billion tokens, 4.2M a step; another length with --config.train.num_tokens=N
Memory:    compiled ahead of time, GiB per H100: 7b 22 on 8, 13b 22 on 16, 30b 29 on 32, 70b 33 on 128 in two replicas
Expected:  speed and loss are not measured yet

Shapes and learning rates: Touvron et al. 2023, "LLaMA" and "Llama 2"; Rozière et al. 2023, "Code Llama".
"""

from ml_collections import ConfigDict

from maxlm.config.load import default
from maxlm.errors import InputError

# variant → (layers, width, heads, key/value heads, inner width of the feed-forward, peak learning rate)
SHAPES = {
    '7b': (32, 4096, 32, 32, 11_008, 3e-4),
    '13b': (40, 5120, 40, 40, 13_824, 3e-4),
    '30b': (60, 6656, 52, 52, 17_920, 1.5e-4),
    '70b': (80, 8192, 64, 8, 28_672, 1.5e-4),
}


def get_config(variant: str = '7b') -> ConfigDict:
    if variant not in SHAPES:
        raise InputError(f'configs/code.py has no variant {variant!r}; there are: {", ".join(SHAPES)}')
    num_layers, dim, num_heads, num_kv_heads, ffn_dim, learning_rate = SHAPES[variant]
    config = default()

    config.model.family = 'llama'
    # The 32 000 ids of Llama and 16 for infilling and the like.
    config.model.vocab_size = 32_016
    config.model.num_layers = num_layers
    config.model.dim = dim
    config.model.num_heads = num_heads
    config.model.num_kv_heads = num_kv_heads
    config.model.ffn_dim = ffn_dim
    config.model.remat = 'full'

    config.data.window = 4096

    config.train.num_tokens = 200_000_000_000
    config.train.global_batch = 1024
    config.train.micro_batch = 1

    config.eval.every = 500
    config.eval.num_batches = 1
    config.eval.samples = 4

    config.optimizer.learning_rate = learning_rate
    config.optimizer.min_learning_rate = learning_rate / 10
    config.optimizer.warmup_steps = 2000
    config.optimizer.clip_norm = 1.0

    config.checkpoint.every_steps = 250
    config.checkpoint.keep_last = 5
    return config
