"""Environments with 0.3M parameters: SFT on conversations of a teacher that makes mistakes, then GRPO.

Command:   python -m examples.demonstrations guess_number --output data/guess_number/chats.jsonl
           maxlm prepare --input data/guess_number/chats.jsonl --format chat --chat-template chatml \
               --tokenizer bpe:512 --pack-seq-len 256 --output data/guess_number/chats
           maxlm train --config=configs/environments.py:guess_number-sft --workdir=runs/guess_number-sft
           maxlm grpo --config=configs/environments.py:guess_number-rl --workdir=runs/guess_number-rl
           and the same with calculator or write_function
Variants:  guess_number-sft · calculator-sft · write_function-sft ·
           guess_number-rl · calculator-rl · write_function-rl, which start from the workdir of the same name with -sft
Hardware:  any CPU
Time:      minutes (docs/posttraining.md)
Cost:      nothing
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from maxlm.config.loading import default
from maxlm.errors import InputError


class Settings(NamedTuple):
    """Settings that depend on the environment.

    Attributes:
        environment: name of the class.
        max_turns: turns of the model.
        length: tokens of a conversation.
        response: tokens after the prompt.
        dim: width of the model.
        sft_steps, rl_steps: steps of both stages.
        learning_rate: that of GRPO.
    """

    environment: str
    max_turns: int
    length: int
    response: int
    dim: int
    sft_steps: int
    rl_steps: int
    learning_rate: float


ENVIRONMENTS = {
    'guess_number': Settings('GuessNumber', 4, 80, 56, 64, 300, 40, 1e-3),
    'calculator': Settings('Calculator', 4, 208, 136, 96, 300, 30, 5e-4),
    'write_function': Settings('WriteFunction', 2, 112, 72, 96, 300, 30, 5e-4),
}
VARIANTS = [f'{name}-{stage}' for name in ENVIRONMENTS for stage in ('sft', 'rl')]


def get_config(variant: str = 'guess_number-sft') -> ConfigDict:
    if variant not in VARIANTS:
        raise InputError(f'configs/environments.py has no variant {variant!r}; there are: {", ".join(VARIANTS)}')
    name, _, stage = variant.partition('-')
    settings = ENVIRONMENTS[name]
    config = default()

    config.model.family = 'llama'
    config.model.num_layers = 2
    config.model.dim = settings.dim
    config.model.num_heads = 2
    config.model.dtype = 'float32'  # CPU cores are slower in bfloat16
    config.model.scan_layers = False  # scanning copies each layer's parameters out of the stacked arrays
    config.model.tie_embeddings = True

    config.data.path = f'data/{name}/chats'
    config.data.seq_len = 256

    config.train.log_every = 10
    config.checkpoint.max_to_keep = 2
    config.optimizer.weight_decay = 0.01

    if stage == 'sft':
        config.train.num_steps = settings.sft_steps
        config.train.global_batch_size = 16
        config.eval.interval = 100
        config.optimizer.learning_rate = 3e-3
        config.optimizer.min_learning_rate = 3e-4
        config.optimizer.warmup_steps = 20
        config.checkpoint.save_interval_steps = 100
        return config

    config.train.objective = 'grpo'
    config.train.init_from = f'runs/{name}-sft'
    config.train.num_steps = settings.rl_steps
    config.train.global_batch_size = 128
    config.train.log_every = 5
    config.data.seq_len = settings.length
    config.grpo.environment = f'examples.{name}:{settings.environment}'
    config.grpo.max_turns = settings.max_turns
    config.grpo.num_generations = 8
    config.grpo.prompts_per_rollout = 16
    config.grpo.max_completion_length = settings.response
    config.grpo.eval_num_generations = 4
    config.eval.interval = 10
    config.eval.num_samples = 4
    config.optimizer.learning_rate = settings.learning_rate
    config.optimizer.min_learning_rate = settings.learning_rate / 10
    config.optimizer.schedule = 'linear'
    config.optimizer.warmup_steps = 2
    config.optimizer.weight_decay = 0.0
    config.checkpoint.save_interval_steps = 10
    # GRPO batches depend on the current model, so a rollback has no fixed batches to skip.
    config.guard.spike_window = 0
    config.guard.max_rollbacks = 0
    return config
