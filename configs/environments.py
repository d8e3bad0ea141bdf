"""Functions with a second attempt, 0.3M parameters: SFT on many wrong programs, then GRPO in an environment.

Command:   python -m examples.demonstrations write_function --output data/write_function/chats.jsonl
           maxlm prepare --input data/write_function/chats.jsonl --format chat --chat-template chatml \
               --tokenizer bpe:512 --pack-seq-len 256 --output data/write_function/chats
           maxlm train --config=configs/environments.py:write_function-sft --workdir=runs/write_function-sft
           maxlm grpo --config=configs/environments.py:write_function-rl --workdir=runs/write_function-rl
Variants:  write_function-sft · write_function-rl, which starts from runs/write_function-sft
Hardware:  any CPU
Time:      sft 200 seconds and rl 12 minutes, on two cores that other programs kept busy (docs/posttraining.md)
Cost:      nothing
Expected:  accuracy on 100 held-out functions with seed 0: greedy answers 0.05 after sft and 0.63 after rl, sampled
           answers 0.39 and 0.63
"""

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError

VARIANTS = ('write_function-sft', 'write_function-rl')


def get_config(variant: str = VARIANTS[0]) -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/environments.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    config = default()

    config.model.family = 'llama'
    config.model.num_layers = 2
    config.model.dim = 96
    config.model.num_heads = 2
    config.model.dtype = 'float32'  # CPU cores are slower in bfloat16
    config.model.scan_layers = False  # scanning copies each layer's parameters out of the stacked arrays
    config.model.tie_embeddings = True

    config.data.path = 'data/write_function/chats'
    config.data.seq_len = 256

    config.train.log_every = 10
    config.checkpoint.max_to_keep = 2
    config.optimizer.weight_decay = 0.01

    if variant == VARIANTS[0]:
        config.train.num_steps = 300
        config.train.global_batch_size = 16
        config.eval.interval = 100
        config.optimizer.learning_rate = 3e-3
        config.optimizer.min_learning_rate = 3e-4
        config.optimizer.warmup_steps = 20
        config.checkpoint.save_interval_steps = 100
        return config

    config.train.objective = 'grpo'
    config.train.init_from = 'runs/write_function-sft'
    config.train.num_steps = 30
    config.train.global_batch_size = 128
    config.train.log_every = 5
    config.data.seq_len = 112
    config.grpo.environment = 'examples.write_function:WriteFunction'
    config.grpo.max_turns = 2
    config.grpo.num_generations = 8
    config.grpo.prompts_per_rollout = 16
    config.grpo.max_completion_length = 72
    config.grpo.eval_num_generations = 4
    config.eval.interval = 10
    config.eval.num_samples = 4
    config.optimizer.learning_rate = 5e-4
    config.optimizer.min_learning_rate = 5e-5
    config.optimizer.schedule = 'linear'
    config.optimizer.warmup_steps = 2
    config.optimizer.weight_decay = 0.0
    config.checkpoint.save_interval_steps = 10
    # GRPO batches depend on the current model, so a rollback has no fixed batches to skip.
    config.guard.spike_window = 0
    config.guard.max_rollbacks = 0
    return config
