"""GPT-NeoX with 1.41B parameters ("1.2B" without embeddings): width 2048, 24 layers, 16 heads, 25 % rotary dimensions.

Command:   maxlm recipe --config=configs/neox.py:production_8gpu text=TOKENS
           prepares TOKENS, nested directories of .npz files, trains in runs/neox-production_8gpu and exports the model.
           Token files have the ids of GPT-2 unless tokenizer= states others. If TOKENS is text, a tokenizer is trained
Variants:  test              published trial: 1000 steps of 2 sequences × 2 accumulation steps, the first five files
           production        published, two GPUs with 24 GB: 25 000 steps of 4 × 4 sequences per GPU
           production_8gpu   published, 8 GPUs: 590 625 steps (three epochs) of 8 × 4 sequences per GPU
           tuned_1gpu · tuned_24gb · tuned   one GPU with 80 GB, two with 24 GB, 8 with 80 GB; see below
           tuned_10gb        one GPU with 10 GB, the published minimum: the same layers with a width of 1024 (410M)
           smoke             two narrow layers and 10 steps, to try the recipe on a CPU
           --config.train.num_steps=N sets another number of steps
Hardware:  as above, test on one GPU with 40 GB or more; any number of devices that divides the batch gives the same
           results
Time:      production: 0.8 billion tokens; production_8gpu: 155 billion tokens;
           tuned_1gpu and tuned_24gb: 5.2 billion tokens; tuned: 29 billion tokens
Memory:    compiled ahead of time, GiB per device: tuned_1gpu 51 on one H100, tuned 32 on each of 8, tuned_24gb and
           production 18 on each of two RTX 4090, production_8gpu 21 on each of 8 H100, tuned_10gb 7.1 on one RTX 3080
Expected:  speed and loss are not measured yet

The published variants have sequences of 1024 tokens. The tuned variants have the sequence length, the learning rate and
the warm-up fraction of Pythia-1.4B (Biderman et al. 2023), and `tuned` has its batch of 2.1 million tokens. `tuned`
trains on 20 tokens per parameter, the compute-optimal number (Hoffmann et al. 2022), with a fifth of the published
compute.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.config.smoke import shrink
from maxlm.errors import InputError

# variant → (sequence length, steps, sequences per step, sequences per device at a time, peak learning rate, warm-up
# steps, steps between checkpoints, steps between log lines)
VARIANTS = {
    'test': (1024, 1000, 4, 2, 3e-4, 10, 200, 25),
    'production': (1024, 25_000, 32, 4, 2e-4, 500, 1250, 250),
    'production_8gpu': (1024, 590_625, 256, 8, 3e-4, 11_812, 20_000, 3000),
    'tuned_1gpu': (2048, 20_000, 128, 8, 2e-4, 200, 1000, 10),
    'tuned_24gb': (2048, 20_000, 128, 2, 2e-4, 200, 1000, 10),
    'tuned': (2048, 14_000, 1024, 8, 2e-4, 140, 1000, 10),
    'tuned_10gb': (2048, 31_000, 128, 4, 3e-4, 310, 1000, 10),
}
# Variants for devices with 24 GB.
SMALL_MEMORY = ('production', 'tuned_24gb')


# Ids of the published token files: those of GPT-2, whose <|endoftext|> ends a document.
TOKEN_IDS = 'ids:50257:50256'


def get_phases(variant: str = 'production_8gpu') -> list[str]:
    tokenizer = {'test': 'bpe:8192', 'smoke': 'bpe:300'}.get(variant, 'bpe:50257') + f'|{TOKEN_IDS}'
    limit = ' --max-files 5' if variant == 'test' else ''
    return [
        f'prepare --input {{text}} --output data/neox-{variant} --tokenizer {{tokenizer:{tokenizer}}}{limit}',
        f'train --config={{config}}:{variant}',
    ]


def get_config(variant: str = 'production_8gpu') -> ConfigDict:
    if variant not in (*VARIANTS, 'smoke'):
        raise InputError(f'configs/neox.py has no variant {variant!r}; there are: {", ".join((*VARIANTS, "smoke"))}')
    settings = VARIANTS['test' if variant == 'smoke' else variant]
    seq_len, num_steps, global_batch, micro_batch, learning_rate, warmup_steps, save_interval, log_every = settings
    config = default()

    config.model.family = 'gpt_neox'
    config.model.vocab_size = 50_257
    config.model.num_layers = 24
    # Pythia-410M; the state of the published model has 16 GB.
    config.model.dim = 1024 if variant == 'tuned_10gb' else 2048
    config.model.num_heads = 16
    config.model.ffn_dim = 4 * config.model.dim
    # The fastest compiled programs that fit; on H100, 'dots_no_batch' is 7 % slower than 'none'.
    config.model.remat_policy = 'dots_no_batch' if variant in SMALL_MEMORY else 'none'
    config.model.scan_layers = False
    if variant == 'tuned_10gb':
        config.model.remat_policy = 'full'
        config.model.scan_layers = True
        config.optimizer.moment_dtype = 'bfloat16'
    # ZeRO-2 gathers parameters once per step; 24 GB are too small for a copy of all parameters.
    config.mesh.zero_stage = 3 if variant in SMALL_MEMORY else 2

    config.data.path = f'data/neox-{variant}'
    config.data.seq_len = seq_len

    config.train.num_steps = num_steps
    config.train.global_batch_size = global_batch
    config.train.per_device_batch_size = micro_batch
    config.train.log_every = log_every

    config.eval.interval = save_interval
    config.eval.num_batches = 4
    config.eval.num_samples = 4

    config.optimizer.learning_rate = learning_rate
    config.optimizer.min_learning_rate = learning_rate / 10
    config.optimizer.warmup_steps = warmup_steps
    config.optimizer.weight_decay = 0.1
    config.optimizer.max_grad_norm = 1.0

    config.checkpoint.save_interval_steps = save_interval
    config.checkpoint.max_to_keep = 5
    config.export.at_end = True
    return shrink(config) if variant == 'smoke' else config
