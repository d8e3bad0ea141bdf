"""Environment for GRPO in which the model guesses a number over several turns.

    maxlm grpo … --config.grpo.environment=examples.guess_number:GuessNumber --config.grpo.max_turns=5

Each guess is answered with `higher` or `lower`. The reward is 1 for the number, and otherwise up to 0.2 for a
near last guess.
"""

import random
import re

from maxlm import EnvironmentStep, Trajectory


class GuessNumber:
    """One conversation about one number from 1 to `high`."""

    def __init__(self, high: int = 15):
        self.high = high
        self.weights = {'found': 1.0, 'near': 0.2}
        self.number = 0
        self.distance = high

    def examples(self, split: str) -> list[dict]:
        """Returns examples without fields, because the seed chooses the number."""
        return [{}] * (64 if split == 'train' else 100)

    def reset(self, example: dict, seed: int) -> list[dict]:
        """Chooses the number and returns the question."""
        self.number = random.Random(seed).randint(1, self.high)
        return [{'role': 'user', 'content': f'Guess a number from 1 to {self.high}.'}]

    async def step(self, messages: list[dict]) -> EnvironmentStep:
        """Answers a guess."""
        found = re.search(r'\d{1,9}', messages[-1]['content'])
        if found is None:
            return EnvironmentStep([{'role': 'user', 'content': 'Say a number.'}], 0.0, False)
        guess = int(found.group())
        self.distance = min(self.high, abs(guess - self.number))
        if guess == self.number:
            return EnvironmentStep([], 0.0, True)
        return EnvironmentStep([{'role': 'user', 'content': 'higher' if guess < self.number else 'lower'}], 0.0, False)

    def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Returns the rewards. The last one is a metric, because `weights` lacks it."""
        found, turns = float(trajectory.done), len(trajectory.rewards)
        return {'found': found, 'near': (1 - found) * (1 - self.distance / self.high), 'turns': turns}
