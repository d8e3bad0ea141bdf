"""Opens the sandbox or the process for the functions of the user in a config."""

from __future__ import annotations

import contextlib

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.rl.rewards.reward_processes import RewardProcesses
from maxlm.rl.rewards.rewards import parse_reward
from maxlm.rl.rewards.tools import tool_function
from maxlm.sandbox.functions import FunctionPool, UserFunction


def open_functions(grpo: GrpoConfig, stack: contextlib.ExitStack) -> FunctionPool | None:
    """Returns the sandbox with the rewards and tools of the user; None without `grpo.sandbox_functions`.

    Raises:
        InputError: a reward cannot be parsed, there is no function or it cannot be imported, or this machine cannot
            isolate untrusted programs.
    """
    if not grpo.sandbox_functions:
        return None
    found = dict.fromkeys([*_rewards(grpo), *map(tool_function, grpo.tools)])
    if not found:
        raise InputError(
            f'grpo.sandbox_functions=True has no effect with grpo.reward={grpo.reward!r}, because no reward and no '
            'tool is a function of the user; remove the key'
        )
    functions = stack.enter_context(FunctionPool(list(found)))
    logger.info(f'{", ".join(function.name for function in found)} run in a {functions}')
    return functions


def open_reward_processes(grpo: GrpoConfig, stack: contextlib.ExitStack) -> RewardProcesses | None:
    """Returns the processes of rewards of the user; None if they run in this process or in the sandbox.

    They run in processes of their own if these compute them in the background, or if `grpo.reward_processes` is set.

    Raises:
        InputError: a reward cannot be parsed or imported, or `grpo.reward_processes` has no effect.
    """
    found, number = list(dict.fromkeys(_rewards(grpo))), grpo.reward_processes
    if number and not found:
        raise InputError(
            f'grpo.reward_processes={number} has no effect with grpo.reward={grpo.reward!r}, which contains no '
            'function of the user; remove the key'
        )
    if not found or grpo.sandbox_functions or not (number or grpo.max_staleness):
        return None
    return stack.enter_context(RewardProcesses(found, number or 1))


def _rewards(grpo: GrpoConfig) -> list[UserFunction]:
    sums = [parse_reward(reward, is_imported=False) for reward in (grpo.reward, grpo.eval_reward) if reward]
    return [function for total in sums for function in total.user_functions]
