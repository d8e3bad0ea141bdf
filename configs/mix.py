"""Llama models from 85M to 1.46B parameters for 8 × A100: a published series, trained on four weighted sources.

Command:   maxlm recipe --config=configs/mix.py:xlarge source45=A source25=B source20=C source10=D
           prepares the four sources, each a path, a URL or a data set of the hub (hf:NAME), with one tokenizer, trains
           in runs/mix-xlarge and exports the model
Variants:  tiny · small · medium · medium-large · large · xlarge
           smoke: two narrow layers and 10 steps, to try the recipe on a CPU
           To train on one data set instead: --config.data.sources='()' --config.data.path=data/mine
Hardware:  8 × A100; tiny and small on one GPU, or on a CPU for a trial
Time:      11 billion tokens, 83 924 steps; 39 hours for xlarge at its published 79 200 tokens/s
Memory:    compiled ahead of time: xlarge 26 GiB on each of 8 × H100; small 12 GiB on an RTX 4090
Expected:  speed and loss are not measured yet

Layers, widths, batch size, learning rates, warm-up and source weights are the published values. Vocabulary, heads and
feed-forward widths were not published. A tied vocabulary of 100 224 and a feed-forward width of 9/4 of the model width
reproduce the published parameter counts of five variants to the last digit.
The variant medium has 373M, where 374M was published.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.config.smoke import shrink
from maxlm.errors import InputError

# variant → (layers, width, heads)
SHAPES = {
    'tiny': (12, 512, 8),
    'small': (16, 768, 12),
    'medium': (24, 1024, 16),
    'medium-large': (20, 1152, 18),
    'large': (24, 1536, 12),
    'xlarge': (32, 1920, 15),
}
TOKENS_PER_STEP = 2**17
# Percentages of the sources.
WEIGHTS = (45, 25, 20, 10)


def get_phases(variant: str = 'xlarge') -> list[str]:
    data, size = ('data/mix-smoke', 300) if variant == 'smoke' else ('data/mix', 100_224)
    first, *others = WEIGHTS
    return [
        f'prepare --input {{source{first}}} --output {data}-{first} --tokenizer {{tokenizer:bpe:{size}}}',
        *(
            f'prepare --input {{source{weight}}} --output {data}-{weight} --tokenizer {data}-{first}/tokenizer.json'
            for weight in others
        ),
        f'train --config={{config}}:{variant}',
    ]


def get_config(variant: str = 'xlarge') -> ConfigDict:
    if variant == 'smoke':
        config = shrink(get_config('tiny'))
        config.data.sources = tuple((f'data/mix-smoke-{weight}', weight / 100) for weight in WEIGHTS)
        return config
    if variant not in SHAPES:
        raise InputError(f'configs/mix.py has no variant {variant!r}; there are: {", ".join((*SHAPES, "smoke"))}')
    num_layers, dim, num_heads = SHAPES[variant]
    config = default()

    config.model.family = 'llama'
    config.model.vocab_size = 100_224
    config.model.num_layers = num_layers
    config.model.dim = dim
    config.model.num_heads = num_heads
    config.model.ffn_dim = 9 * dim // 4
    config.model.tie_embeddings = True
    # Compiled for 8 × H100, xlarge is as fast with small micro-batches as with rematerialization. A loop over layers
    # would copy the saved activations.
    config.model.remat_policy = 'none'
    config.model.scan_layers = False

    # Gathers parameters once per step.
    config.mesh.zero_stage = 2

    config.data.sources = tuple((f'data/mix-{weight}', weight / 100) for weight in WEIGHTS)
    config.data.seq_len = 2048

    config.train.num_tokens = 11_000_000_000
    config.train.global_batch_size_tokens = TOKENS_PER_STEP
    config.train.per_device_batch_size = 8 if dim < 1500 else 4

    config.eval.interval = 500
    config.eval.num_batches = 4
    config.eval.num_samples = 4

    config.optimizer.learning_rate = 3e-4
    config.optimizer.min_learning_rate = 3e-5
    config.optimizer.warmup_tokens = 100_000_000
    config.optimizer.max_grad_norm = 1.0

    config.checkpoint.save_interval_steps = 500
    config.checkpoint.max_to_keep = 1
    config.checkpoint.keep_best = 3
    config.export.at_end = True
    return config
