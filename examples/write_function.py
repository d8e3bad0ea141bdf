"""Environment for GRPO in which the model writes a Python function and may correct it once.

    maxlm grpo … --config.grpo.environment=examples.write_function:WriteFunction --config.grpo.max_turns=2

The sandbox runs the unit tests. The reward is 1 if all pass, and 1.5 if they do at the first attempt. Lines of
`grpo.prompts` have the fields of the reward `all_tests`; without such a file, the problems are those of
`examples.tasks.synth`. `python -m examples.demonstrations write_function` writes conversations of a teacher.
"""

import functools
import json
import os
import queue
import random
import threading

from examples.tasks.synth import make_problems
from maxlm import EnvironmentStep, Trajectory
from maxlm.rl.rewards.code_task import run_tasks
from maxlm.sandbox.pool import SandboxPool

STARTING = threading.Lock()


@functools.cache
def sandboxes() -> queue.SimpleQueue:
    """Starts a sandbox for each core. All conversations share them."""
    pools: queue.SimpleQueue = queue.SimpleQueue()
    for _ in range(os.cpu_count() or 1):
        pools.put(SandboxPool(workers=1))
    return pools


@functools.lru_cache(maxsize=10_000)
def passes(response: str, task: str) -> bool:
    """Returns whether a program passes the tests of a task. Other responses of a rollout are often the same program."""
    with STARTING:
        pools = sandboxes()
    pool = pools.get()
    try:
        return run_tasks(pool, [response], [json.loads(task)]) == [1.0]
    finally:
        pools.put(pool)


class WriteFunction:
    """One conversation about a function."""

    def __init__(self):
        self.task = ''

    def examples(self, split: str) -> list[dict]:
        """Returns the problems of a split: `train`, `eval` or `demonstrations`. No problem is in two of them."""
        problems = [problem for problem in make_problems(0) if 'f(x)' in problem.question]
        random.Random(0).shuffle(problems)
        parts = {'eval': slice(100), 'train': slice(100, 350), 'demonstrations': slice(350, None)}
        return [{'messages': [problem.user_turn], **problem.task} for problem in problems[parts[split]]]

    def reset(self, example: dict, seed: int) -> list[dict]:
        """Returns the question."""
        del seed
        self.task = json.dumps(example)
        return example.get('messages') or [{'role': 'user', 'content': example['prompt']}]

    def step(self, messages: list[dict]) -> EnvironmentStep:
        """Runs the tests. A program that fails is answered with a request for another one."""
        if not passes(messages[-1]['content'], self.task):
            return EnvironmentStep([{'role': 'user', 'content': 'A test failed. Try again.'}], 0.0, False)
        is_first = sum(message['role'] == 'assistant' for message in messages) == 1
        return EnvironmentStep([], 1.5 if is_first else 1.0, True)

    def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Returns no further rewards."""
        return {}
