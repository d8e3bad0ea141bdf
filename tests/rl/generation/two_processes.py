"""Runs code as two processes, one after the other, in one process."""

import types

import jax

from maxlm.rl.environments import first_process


def fake_processes(monkeypatch):
    """Makes two processes, and yields the index of each, while it is that of this process.

    What the first one broadcasts, the second one receives.
    """
    sent = []

    def broadcast(value):
        if jax.process_index() == 0:
            sent.append(value)
            return value
        return sent.pop(0)

    with monkeypatch.context() as patch:
        patch.setattr(first_process, 'multihost_utils', types.SimpleNamespace(broadcast_one_to_all=broadcast))
        patch.setattr(jax, 'process_count', lambda: 2)
        for process in range(2):
            patch.setattr(jax, 'process_index', lambda process=process: process)
            yield process
