"""Opens the sandbox for the functions of the user in a config."""

from __future__ import annotations

import contextlib

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.log import logger
from maxlm.rl.rewards.rewards import parse_reward
from maxlm.rl.rewards.tools import tool_function
from maxlm.sandbox.functions import FunctionPool


def open_functions(grpo: GrpoConfig, stack: contextlib.ExitStack) -> FunctionPool | None:
    """Returns the sandbox with the rewards and tools of the user; None without them or `grpo.sandbox_functions`.

    Raises:
        InputError: a reward cannot be parsed, a function cannot be imported, or this machine cannot isolate untrusted
            programs.
    """
    if not grpo.sandbox_functions:
        return None
    sums = [parse_reward(reward, is_imported=False) for reward in (grpo.reward, grpo.eval_reward) if reward]
    found = dict.fromkeys(function for total in sums for function in total.user_functions)
    found |= dict.fromkeys(map(tool_function, grpo.tools))
    if not found:
        return None
    functions = stack.enter_context(FunctionPool(list(found)))
    logger.info(f'{", ".join(function.name for function in found)} run in a {functions}')
    return functions
