"""Flags with 0.1M parameters: SFT, a reward model of readers who prefer green stripes, then GRPO with this reward.

Command:   python -m examples.tasks.flags --output data/flags
           maxlm prepare --input data/flags/chats.jsonl --format chat --chat-template chatml --tokenizer bytes \
               --pack-seq-len 64 --validation-fraction 0.2 --output data/flags/chats
           maxlm train --config=configs/flags.py:sft --workdir=runs/flags-sft
           maxlm prepare --input data/flags/pairs.jsonl --format preference --chat-template chatml \
               --tokenizer runs/flags-sft/tokenizer.json --pack-seq-len 64 --validation-fraction 0.2 \
               --output data/flags/pairs
           maxlm train --config=configs/flags.py:reward --workdir=runs/flags-reward
           maxlm grpo --config=configs/flags.py:rl --workdir=runs/flags-rl
Variants:  sft · reward and rl, which start from runs/flags-sft; rl scores answers with runs/flags-reward
Hardware:  any CPU
Time:      a few minutes (docs/posttraining.md)
Cost:      nothing
Expected:  over three seeds, the reward model prefers the right answer in 88–99 % of held-out pairs; 96–97 % of sampled
           flags are green after rl, and 25–32 % before
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

VARIANTS = ('sft', 'reward', 'rl')


def get_config(variant: str = 'sft') -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/flags.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    config = default()

    config.model.family = 'llama'
    config.model.num_layers = 2
    config.model.dim = 64
    config.model.num_heads = 2
    config.model.dtype = 'float32'  # CPU cores are slower in bfloat16
    config.model.scan_layers = False  # scanning copies each layer's parameters out of the stacked arrays
    config.model.tie_embeddings = True

    config.data.path = 'data/flags/chats'
    config.data.seq_len = 64

    config.train.log_every = 10
    config.train.num_steps = 100
    config.train.global_batch_size = 32
    config.eval.interval = 50
    config.eval.num_samples = 2
    config.optimizer.learning_rate = 3e-3
    config.optimizer.min_learning_rate = 3e-4
    config.optimizer.warmup_steps = 10
    config.optimizer.weight_decay = 0.01
    config.checkpoint.save_interval_steps = 100
    config.checkpoint.max_to_keep = 2
    if variant == 'sft':
        return config

    config.train.init_from = 'runs/flags-sft'
    config.optimizer.weight_decay = 0.0
    if variant == 'reward':
        config.train.objective = 'reward'
        config.data.path = 'data/flags/pairs'
        config.optimizer.learning_rate = 1e-3
        config.optimizer.min_learning_rate = 1e-4
        config.eval.interval = 25
        return config

    config.train.objective = 'grpo'
    config.train.num_steps = 40
    config.train.global_batch_size = 128
    config.train.log_every = 5
    config.data.seq_len = 48
    config.grpo.prompts = 'data/flags/prompts.jsonl'
    config.grpo.eval_prompts = 'data/flags/held_out.jsonl'
    config.grpo.reward = 'reward_model'
    config.grpo.reward_model = 'runs/flags-reward'
    # The true preference, which the training does not use.
    config.grpo.eval_reward = 'examples.tasks.flags:is_green'
    config.grpo.num_generations = 16
    config.grpo.prompts_per_rollout = 8
    config.grpo.max_completion_length = 12
    config.grpo.eval_num_generations = 4
    config.eval.interval = 10
    config.optimizer.learning_rate = 1e-3
    config.optimizer.min_learning_rate = 1e-4
    config.optimizer.schedule = 'linear'
    config.optimizer.warmup_steps = 2
    config.checkpoint.save_interval_steps = 20
    # GRPO batches depend on the current model, so a rollback has no fixed batches to skip.
    config.guard.spike_window = 0
    config.guard.max_rollbacks = 0
    return config
