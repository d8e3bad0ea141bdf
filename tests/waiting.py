"""Waits for events of other threads and processes."""

import time


def until(condition, seconds=30.0):
    """Waits until a condition is true. The timeout only ends a failing test."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f'not true after {seconds} s'
        time.sleep(0.005)
