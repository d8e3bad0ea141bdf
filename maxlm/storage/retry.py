"""Retries bucket requests with exponential backoff and warnings."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

from maxlm.storage.errors import TransientStorageError, redact

# Seconds after each consecutive failure: 1, 2, 4, … up to 60.
EXPONENTIAL_BACKOFF = tenacity.wait_exponential(max=60)
# Limit of the seconds that a server may ask for.
MAX_RETRY_AFTER = 600.0

# Called with a one-line message for the user.
OnWarning = Callable[[str], None]
T = TypeVar('T')


class RetryPolicy:
    """Retries requests that fail with a TransientStorageError. Threads that use one bucket share one policy.

    It warns about the first consecutive failure and about those whose number is a power of two, once for all threads. A
    final message reports that the bucket responds again.

    Args:
        on_warning: called with each warning.
        sleep: sleeps for at most the given number of seconds.
    """

    def __init__(self, on_warning: OnWarning, sleep: Callable[[float], None]):
        self._on_warning = on_warning
        self._sleep = sleep
        self._lock = threading.Lock()
        # URLs whose last request failed, and the highest consecutive failure that was reported.
        self._failing: set[str] = set()
        self._warned = 0

    def call(self, url: str, request: Callable[[], T], *, patience_seconds: float = math.inf) -> T:
        """Returns the result of `request`. Repeats it while it raises TransientStorageError.

        Args:
            url: URL of the request, for messages.
            request: the request. Its other errors are raised immediately, so it can raise one to end the retries.
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
                    self._on_warning(f'{state.outcome.exception()}; {which}, retrying in {state.upcoming_sleep:g} s')

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientStorageError),
            wait=_wait_seconds,
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
                self._on_warning(f'{redact(url)}: the bucket responds again')


def _wait_seconds(state: tenacity.RetryCallState) -> float:
    assert state.outcome
    return max(EXPONENTIAL_BACKOFF(state), min(_retry_after(state.outcome.exception()), MAX_RETRY_AFTER))


def _retry_after(error: BaseException | None) -> float:
    """Returns the seconds in the Retry-After header of a response, or 0. Errors of gcsfs have no headers."""
    while error is not None:
        response = getattr(error, 'response', None)
        if isinstance(response, dict):
            headers = response.get('ResponseMetadata', {}).get('HTTPHeaders')
        else:
            headers = getattr(error if response is None else response, 'headers', None)
        value = str(headers.get('retry-after', '')) if headers else ''
        if value.isdecimal():
            return float(value)
        error = error.__cause__
    return 0.0
