"""Opens the sandbox or the process for the functions of the user in a config."""

from __future__ import annotations

import contextlib

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.log import logger
from maxlm.rl.rewards.reward_process import RewardProcess
from maxlm.rl.rewards.rewards import parse_reward
from maxlm.rl.rewards.tools import tool_function
from maxlm.sandbox.functions import FunctionPool, UserFunction


def open_functions(grpo: GrpoConfig, stack: contextlib.ExitStack) -> FunctionPool | None:
    """Returns the sandbox with the rewards and tools of the user; None without them or `grpo.sandbox_functions`.

    Raises:
        InputError: a reward cannot be parsed, a function cannot be imported, or this machine cannot isolate untrusted
            programs.
    """
    if not grpo.sandbox_functions:
        return None
    found = dict.fromkeys([*_rewards(grpo), *map(tool_function, grpo.tools)])
    if not found:
        return None
    functions = stack.enter_context(FunctionPool(list(found)))
    logger.info(f'{", ".join(function.name for function in found)} run in a {functions}')
    return functions


def open_reward_process(grpo: GrpoConfig, stack: contextlib.ExitStack) -> RewardProcess | None:
    """Returns the process of rewards that are computed in the background; None if they are not, or not outside of the
    sandbox.

    Raises:
        InputError: a reward cannot be parsed or imported.
    """
    found = list(dict.fromkeys(_rewards(grpo)))
    if not found or grpo.sandbox_functions or not grpo.max_staleness:
        return None
    return stack.enter_context(RewardProcess(found))


def _rewards(grpo: GrpoConfig) -> list[UserFunction]:
    sums = [parse_reward(reward, is_imported=False) for reward in (grpo.reward, grpo.eval_reward) if reward]
    return [function for total in sums for function in total.user_functions]
