"""GPT-2 with 0.76B parameters ("1B"): width 1536, 24 layers, 24 heads, 2048 learned positions, vocabulary 50 000.

Command:   maxlm recipe --config=configs/1b.py text=TEXT
           prepares TEXT, trains in runs/1b and exports the model to runs/1b/hf. With
           --config.checkpoint.remote_dir=gs://BUCKET/1b, checkpoints and the exported model are uploaded.
Variants:  smoke: two narrow layers and 10 steps, to try the recipe on a CPU
Hardware:  8 × H100 80 GB in one node; any number of devices that divides 512 gives the same results
Time:      100 000 steps of 512 × 2048 tokens = 105 billion tokens, 2.03 passes over the published 51.6 billion tokens
Memory:    25 GiB per GPU, compiled ahead of time for 8 × H100; 26 GiB per chip for 16 × TPU v4
Expected:  50 % MFU on 8 × H100, planned from the compiled step; 46.7 % measured on one H200 (docs/results.md); the loss
           is not measured yet

The settings of the step are the fastest of the compiled programs in tests/planning/estimate/programs.json. On a TPU,
--config.model.scan_layers=true --config.train.per_device_batch_size=4 compiles faster.
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.config.smoke import shrink
from maxlm.errors import InputError


def get_phases(variant: str = '') -> list[str]:
    name, tokenizer = ('1b-smoke', 'bpe:300') if variant else ('1b', 'bpe:50000')
    return [
        f'prepare --input {{text}} --output data/{name} --tokenizer {{tokenizer:{tokenizer}}}',
        f'train --config={{config}}{":" if variant else ""}{variant}',
    ]


def get_config(variant: str = '') -> ConfigDict:
    if variant not in ('', 'smoke'):
        raise InputError(f'configs/1b.py has no variant {variant!r}; there is: smoke')
    config = default()

    config.model.family = 'gpt2'
    config.model.vocab_size = 50_000
    config.model.num_layers = 24
    config.model.dim = 1536
    config.model.num_heads = 24
    config.model.max_positions = 2048
    # Compiled for one H100: 51 % MFU; 46 % with model.remat_policy=dots_no_batch; 41 % with a loop over layers, which
    # copies the saved activations.
    config.model.remat_policy = 'none'
    config.model.scan_layers = False

    config.data.path = 'data/1b'
    config.data.seq_len = 2048

    config.train.num_steps = 100_000
    config.train.global_batch_size = 512
    # 512 sequences = 8 devices × 8 accumulation steps × micro-batches of 8. With micro-batches of 16, the step is 1 %
    # faster, but needs 45 GiB.
    config.train.per_device_batch_size = 8
    config.train.log_every = 10

    config.eval.interval = 1000
    config.eval.num_batches = 4
    config.eval.num_samples = 4

    config.optimizer.learning_rate = 3e-4
    config.optimizer.min_learning_rate = 3e-5
    config.optimizer.warmup_steps = 2000
    config.optimizer.max_grad_norm = 1.0

    # Shards the optimizer state over all devices. Each device sums its gradients, and the sums are reduced once per
    # step. ZeRO-2 reduces them in every micro-batch. The step would then take 1 % longer on 8 × H100 and 14 % on 8 ×
    # L40S, whose links are slower; with ZeRO-3, which also gathers parameters in every micro-batch, 6 % on H100.
    config.mesh.fsdp = -1
    config.mesh.zero_stage = 1

    config.checkpoint.save_interval_steps = 1000
    config.checkpoint.max_to_keep = 5
    config.export.at_end = True
    if variant == 'smoke':
        shrink(config)
        config.data.path = 'data/1b-smoke'
    return config
