"""Opens the rollouts of a config: prompts, rewards, tools and environments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maxlm.checkpoint.manager import find_step
from maxlm.config.schema import Config
from maxlm.config.validation_rl import check_grpo
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.errors import InputError
from maxlm.rl.environments.loading import read_examples
from maxlm.rl.environments.protocol import Environment
from maxlm.rl.generation.environment_sampler import open_environments
from maxlm.rl.generation.tool_environment import open_tools
from maxlm.rl.reward_model import open_reward_model
from maxlm.rl.rewards.open_functions import open_functions, open_reward_processes
from maxlm.rl.rewards.prompts import Prompts, load_encoder, read_prompts
from maxlm.rl.rewards.scorer import RewardScorer, check_tasks
from maxlm.rl.rollouts import RolloutBatches
from maxlm.rl.token_rewards import check_overlong
from maxlm.trainer.checkpointing import INIT_FROM
from maxlm.workdir.files import TOKENIZER


def open_rollouts(config: Config, stack: contextlib.ExitStack) -> tuple[RolloutBatches, int]:
    """Opens the rollouts of a config; see `maxlm.trainer.run.OpenSource`."""
    check_grpo(config)
    check_overlong(config.grpo)
    origin = Path(find_step(config.train.init_from, key=INIT_FROM)).parent.parent
    encoder = load_encoder(origin)
    tokenizer = encoder.tokenizer if isinstance(encoder, ChatEncoder) else encoder
    ends = {*tokenizer.boundaries.stops, *([encoder.end_of_turn] if isinstance(encoder, ChatEncoder) else [])}
    grpo = config.grpo
    eval_reward, reward_model = grpo.eval_reward or grpo.reward, open_reward_model(grpo, encoder)
    functions = open_functions(grpo, stack)
    reward_functions = open_reward_processes(grpo, stack) or functions
    tools, environments = open_tools(grpo, encoder, functions), open_environments(grpo, encoder)

    def read(path: str, reward: str, split: str) -> Prompts:
        if environments is not None:
            return _examples(path, environments.create, split)
        room = config.data.seq_len - grpo.max_completion_length
        prompts = read_prompts(path, encoder, room, tools=tools.schemas if tools else ())
        check_tasks(prompts, reward, reward_functions)
        return prompts

    prompts = read(grpo.prompts, grpo.reward, 'train')
    eval_prompts = read(grpo.eval_prompts, eval_reward, 'eval') if config.eval.interval else None
    if grpo.prompts_per_rollout > prompts.num_prompts:
        raise InputError(
            f'grpo.prompts_per_rollout={grpo.prompts_per_rollout}: {grpo.prompts or grpo.environment} has only '
            f'{prompts.num_prompts} prompts; use at most {prompts.num_prompts}'
        )
    scorer = stack.enter_context(RewardScorer(grpo.reward, eval_reward, functions=reward_functions))
    source = RolloutBatches(
        config,
        prompts=prompts,
        eval_prompts=eval_prompts,
        scorer=scorer,
        tokenizer_path=origin / TOKENIZER,
        ends=sorted(ends),
        tools=tools,
        reward_model=reward_model,
        environments=environments,
    )
    # Before the end of the sandbox and of the reward process, which ends the current job.
    stack.callback(source.close)
    return source, tokenizer.vocab_size


def _examples(path: str, create: Callable[[], Environment], split: str) -> Prompts:
    """Returns examples of environments; their prompts are known only after `reset`."""
    key = 'grpo.prompts' if split == 'train' else 'grpo.eval_prompts'
    examples, lines = read_examples(path, create, split=split, key=key)
    ids = (np.zeros(0, np.uint32),) * len(examples)
    return Prompts(path or f'examples({split!r})', ids, tuple(examples), tuple(lines), 0)
