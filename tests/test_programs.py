"""Tests that later sessions reuse compiled programs."""

import os

from maxlm.runtime.compilation_cache import SUFFIX, enabled_cache
from tests.programs import KEPT_PROGRAMS, PROGRAMS


def test_programs_of_workers_are_kept():
    assert not KEPT_PROGRAMS.is_relative_to(PROGRAMS)
    cache = enabled_cache()
    assert cache is not None
    # Concurrent sessions use the same directory.
    key = f'test-{os.getpid()}'
    cache.put(key, b'program')
    (stored,) = KEPT_PROGRAMS.glob(f'{key}*{SUFFIX}')
    assert cache.get(key) == b'program'
    # A damaged file is no program.
    stored.write_bytes(stored.read_bytes()[:-1] + b'!')
    assert cache.get(key) is None
    assert not stored.exists()
