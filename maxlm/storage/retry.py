"""Retries of requests to buckets: waiting times and warnings."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from maxlm.storage.errors import TransientStorageError, redact

# Seconds after each failure in a row: 1, 2, 4, … and at most 60.
EXPONENTIAL_BACKOFF = tenacity.wait_exponential(max=60)

# Called with one line for a person.
OnWarning = Callable[[str], None]
T = TypeVar('T')


class RetryPolicy:
    """Repeats requests that fail with a TransientStorageError. Threads that share a bucket share one policy.

    The first failure in a row warns, then those whose number is a power of two, once for all threads. One more line
    says that the bucket answers again.

    Args:
        on_warning: called with each warning.
        sleep: waits for a number of seconds, or less.
    """

    def __init__(self, on_warning: OnWarning, sleep: Callable[[float], None]):
        self._on_warning = on_warning
        self._sleep = sleep
        self._lock = threading.Lock()
        # URLs of requests that failed last time, and the largest number of failures that a warning was about.
        self._failing: set[str] = set()
        self._warned = 0

    def call(self, url: str, request: Callable[[], T], *, patience_seconds: float = math.inf) -> T:
        """Returns the result of `request`, which is repeated until it does not raise TransientStorageError.

        Args:
            url: names what is requested.
            request: any other error, also one that it raises to end the retries, is raised at once.
            patience_seconds: the first failure after this time is raised.
        """

        def warn(state: tenacity.RetryCallState) -> None:
            assert state.outcome
            with self._lock:
                failures = state.attempt_number
                self._failing.add(url)
                if failures > self._warned and failures.bit_count() == 1:
                    self._warned = failures
                    which = 'failure' if failures == 1 else f'failure {failures} in a row'
                    self._on_warning(
                        f'{state.outcome.exception()}; {which}, trying again in {state.upcoming_sleep:g} s'
                    )

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientStorageError),
            wait=EXPONENTIAL_BACKOFF,
            stop=tenacity.stop_after_delay(patience_seconds),
            sleep=self._sleep,
            before_sleep=warn,
            reraise=True,
        )
        answered = False
        try:
            result = retrying(request)
            answered = True
            return result
        finally:
            with self._lock:
                self._forget(url, answered)

    def _forget(self, url: str, answered: bool) -> None:
        if url not in self._failing:
            return
        self._failing.remove(url)
        if not self._failing:
            self._warned = 0
            if answered:
                self._on_warning(f'{redact(url)}: the bucket answers again')
