"""One-line Python functions with 0.5M parameters: SFT on answers that are often wrong, then GRPO with unit tests.

Command:   python -m examples.tasks synth --output data/synth
           maxlm prepare --input data/synth/chats.jsonl --format chat --chat-template chatml \
               --tokenizer bpe:400 --pack-seq-len 128 --output data/synth/chats
           maxlm train --config=configs/synth.py:sft --workdir=runs/synth-sft
           maxlm grpo --config=configs/synth.py:rl --workdir=runs/synth-rl
Variants:  sft · rl, which starts from runs/synth-sft
Hardware:  any CPU with 2 cores
Time:      sft about 75 seconds, rl five minutes, with the sandbox (docs/posttraining.md)
Cost:      nothing
Expected:  share of 200 held-out problems whose tests all pass, over three seeds: greedy answers 0.37–0.43 after sft
           and 0.63–0.67 after rl, sampled answers 0.34–0.38 and 0.57–0.61
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

VARIANTS = ('sft', 'rl')


def get_config(variant: str = 'sft') -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/synth.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    config = default()

    config.model.family = 'llama'
    config.model.num_layers = 2
    config.model.dim = 128
    config.model.num_heads = 4
    config.model.dtype = 'float32'  # two CPU cores are slower in bfloat16
    config.model.scan_layers = False  # scanning copies each layer's parameters out of the stacked arrays
    config.model.tie_embeddings = True

    config.data.path = 'data/synth/chats'
    config.data.seq_len = 128

    config.train.log_every = 10
    config.checkpoint.max_to_keep = 2
    config.optimizer.weight_decay = 0.01

    if variant == 'sft':
        config.train.num_steps = 300
        config.train.global_batch_size = 32
        config.eval.interval = 100
        config.optimizer.learning_rate = 3e-3
        config.optimizer.min_learning_rate = 3e-4
        config.optimizer.warmup_steps = 50
        config.checkpoint.save_interval_steps = 200
        return config

    config.train.objective = 'grpo'
    config.train.init_from = 'runs/synth-sft'
    config.data.seq_len = 80  # prompts have up to 44 tokens, answers 21
    config.train.num_steps = 60
    config.train.global_batch_size = 512
    config.train.log_every = 5
    config.grpo.prompts = 'data/synth/prompts.jsonl'
    config.grpo.eval_prompts = 'data/synth/held_out.jsonl'
    config.grpo.reward = 'all_tests'
    config.grpo.num_generations = 16
    config.grpo.prompts_per_rollout = 32
    config.grpo.max_completion_length = 32
    config.grpo.eval_num_generations = 4
    config.eval.interval = 20
    config.eval.num_samples = 4
    config.optimizer.learning_rate = 2e-4
    config.optimizer.min_learning_rate = 2e-5
    config.optimizer.schedule = 'linear'
    config.optimizer.warmup_steps = 5
    config.optimizer.weight_decay = 0.0
    config.checkpoint.save_interval_steps = 20
    # GRPO batches depend on the current model, so a rollback has no fixed batches to skip.
    config.guard.spike_window = 0
    config.guard.max_rollbacks = 0
    return config
