"""Environments of several turns, 0.3M parameters: SFT on the conversations of a teacher with mistakes, then GRPO.

Command:   python -m examples.demonstrations TASK --output data/TASK/chats.jsonl
           maxlm prepare --input data/TASK/chats.jsonl --format chat --chat-template chatml \
               --tokenizer bpe:512 --pack-seq-len 256 --output data/TASK/chats
           maxlm train --config=configs/environments.py:TASK-sft --workdir=runs/TASK-sft
           maxlm grpo --config=configs/environments.py:TASK-rl --workdir=runs/TASK-rl
           where TASK is guess_number, calculator or write_function, as the files in examples/
Variants:  guess_number-sft · guess_number-rl · calculator-sft · calculator-rl · write_function-sft · write_function-rl;
           each of GRPO starts from the run of SFT
Hardware:  any CPU
Time:      sft 1–2 minutes and rl 1–2.5 minutes, on two cores that other programs kept busy (docs/posttraining.md)
Cost:      nothing
Expected:  greedy answers in 100 held-out conversations with seed 0: guess_number finds the number in 0.47 after sft and
           1.00 after rl, calculator is right in 0.57 and 0.92, write_function passes the tests in 0.01 and 0.72
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError


class Task(NamedTuple):
    """An environment of examples/ and its sizes.

    Attributes:
        environment: value of `grpo.environment`.
        turns: maximum number of turns of the model.
        response: maximum number of tokens after the first messages.
        seq_len: maximum number of tokens of a conversation.
        sft_steps: number of steps of SFT.
        rl_steps: number of steps of GRPO.
        learning_rate: peak learning rate of GRPO.
    """

    environment: str
    turns: int
    response: int
    seq_len: int
    sft_steps: int
    rl_steps: int
    learning_rate: float


TASKS = {
    'guess_number': Task('examples.guess_number:GuessNumber', 4, 48, 96, 400, 20, 1e-3),
    'calculator': Task('examples.calculator:Calculator', 4, 128, 208, 600, 20, 1e-3),
    'write_function': Task('examples.write_function:WriteFunction', 2, 72, 112, 300, 30, 5e-4),
}
VARIANTS = tuple(f'{task}-{phase}' for task in TASKS for phase in ('sft', 'rl'))


def get_config(variant: str = VARIANTS[0]) -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/environments.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    name, phase = variant.split('-')
    task = TASKS[name]
    config = default()

    config.model.family = 'llama'
    config.model.num_layers = 2
    config.model.dim = 96
    config.model.num_heads = 2
    config.model.dtype = 'float32'  # CPU cores are slower in bfloat16
    config.model.scan_layers = False  # scanning copies each layer's parameters out of the stacked arrays
    config.model.tie_embeddings = True

    config.data.path = f'data/{name}/chats'
    config.data.seq_len = 256

    config.train.log_every = 10
    config.checkpoint.max_to_keep = 2
    config.optimizer.weight_decay = 0.01

    if phase == 'sft':
        config.train.num_steps = task.sft_steps
        config.train.global_batch_size = 16
        config.eval.interval = 100
        # Copying digits into calls takes AdamW several times as many steps.
        config.optimizer.name = 'muon'
        config.optimizer.learning_rate = 0.01
        config.optimizer.adam_learning_rate = 3e-3
        config.optimizer.min_learning_rate = 1e-3
        config.optimizer.warmup_steps = 20
        config.checkpoint.save_interval_steps = 100
        return config

    config.train.objective = 'grpo'
    config.train.init_from = f'runs/{name}-sft'
    config.train.num_steps = task.rl_steps
    config.train.global_batch_size = 128
    config.train.log_every = 5
    config.data.seq_len = task.seq_len
    config.grpo.environment = task.environment
    config.grpo.max_turns = task.turns
    config.grpo.num_generations = 8
    config.grpo.prompts_per_rollout = 16
    config.grpo.max_completion_length = task.response
    config.grpo.eval_num_generations = 4
    config.eval.interval = 10
    config.eval.num_samples = 4
    config.optimizer.learning_rate = task.learning_rate
    config.optimizer.min_learning_rate = task.learning_rate / 10
    config.optimizer.schedule = 'linear'
    config.optimizer.warmup_steps = 2
    config.optimizer.weight_decay = 0.0
    config.checkpoint.save_interval_steps = 10
    # GRPO batches depend on the current model, so a rollback has no fixed batches to skip.
    config.guard.spike_window = 0
    config.guard.max_rollbacks = 0
    return config
