"""Continues responses after results of tools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from maxlm.rl.generation.responses import Responses
from maxlm.rl.generation.rollout_generator import Sampler, join_runs
from maxlm.training.state import Params

# Quotient of the numbers of rows for which the program is compiled.
SHRINK = 4


class ContinuationSampler(Sampler):
    """Generates the next tokens of texts, each with its own limit and random keys."""

    def resume(
        self,
        params: Params,
        texts: Sequence[Sequence[int]],
        *,
        seed: int,
        rows: Sequence[int],
        limits: Sequence[int],
        temperature: float = 1.0,
        rows_per_run: int,
    ) -> Responses:
        """Continues one response per text with the random keys of `__call__` for the same row and position.

        The program has a fixed number of rows, or a fraction of it for few texts, so it is compiled a few times.

        Args:
            params: parameters, sharded on the mesh.
            texts: token ids of each prompt and the tokens after it.
            seed: seed of the samples.
            rows: row index of each text.
            limits: maximum number of tokens of each continuation, at least 1.
            temperature: divisor of the logits for sampling; 0 = greedy.
            rows_per_run: maximum number of rows generated at the same time, rounded down to a multiple of the devices
                that rows are sharded over.

        Returns:
            The continuations. `ended_B` is also True for rows that have reached their limit.
        """
        shards = self._layout.num_shards('batch')
        P = max(1, rows_per_run // shards) * shards
        # Few sizes, because each is compiled.
        while len(texts) * SHRINK <= P and P % (SHRINK * shards) == 0:
            P //= SHRINK
        self._check(texts, 1, temperature, P)
        runs = []
        for start in range(0, len(texts), P):
            row_and_limit_2P = np.zeros((2, P), np.uint32)
            for index, values in enumerate((rows, limits)):
                part = values[start : start + P]
                row_and_limit_2P[index, : len(part)] = np.asarray(part).astype(np.uint32)
            runs.append(
                self._run(params, texts[start : start + P], P, (seed, 0), temperature, 1, self._put(row_and_limit_2P))
            )
        return join_runs(runs, len(texts))
