"""Waits for events of other threads and processes."""

import time

import psutil


def until(condition, seconds=30.0):
    """Waits until a condition is true. The timeout only ends a failing test."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f'not true after {seconds} s'
        time.sleep(0.005)


def has_ended(process: psutil.Process) -> bool:
    """Returns whether a process has exited. A process whose parent has not read its status has exited, too."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
