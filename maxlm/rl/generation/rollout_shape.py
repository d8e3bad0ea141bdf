"""Batch shapes of rollouts."""

from __future__ import annotations

from collections.abc import Iterator


def plan_runs(
    num_prompts: int, num_samples: int, rows_per_run: int, *, shards: int, lengths: tuple[int, int]
) -> tuple[int, int]:
    """Chooses the batch shape of `Sampler`.

    The prompts of a call are sharded over `shards` devices; empty prompts pad the batch. If there are few prompts,
    prefilling a prompt several times, each time for some of its samples, can be cheaper.

    Args:
        num_prompts: number of prompts.
        num_samples: number of samples per prompt.
        rows_per_run: maximum number of rows per call; 0 = unlimited.
        shards: number of devices that the batch is sharded over.
        lengths: lengths of prompt and response, which determine the cost.

    Returns:
        Number of samples that share one prefilled prompt, and number of prompts per call.
    """

    def choices() -> Iterator[tuple[int, int, int]]:
        T, R = lengths
        for group in range(1, num_samples + 1):
            most = rows_per_run // group // shards if rows_per_run else num_prompts * num_samples
            if num_samples % group or not most:
                continue
            # A unit is one prompt per device.
            units = -(-num_prompts * (num_samples // group) // shards)
            runs = -(-units // most)
            P = -(-units // runs) * shards
            yield runs * P * (T + group * R), -group, P

    _, group, P = min(choices())
    return -group, P
