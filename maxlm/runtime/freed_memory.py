"""Memory that a step on a CPU frees stays with the process, for the next step.

XLA allocates a step's temporary arrays anew each time. glibc gives blocks of their size back to the system at once,
which then clears every page of them again for the next step: a quarter of the time of a small model on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
# Bytes by which the heap grows at a time; pages count when they are touched, not before.
_GROWTH = 2**26
# Files of devices besides the CPU: GPUs of NVIDIA and AMD, TPUs.
_ACCELERATORS = ('dev/nvidia0', 'dev/kfd', 'dev/accel0', 'dev/vfio/0')


def keep_freed_memory(root: Path = Path('/')) -> bool:
    """Has malloc keep what is freed. To be called before JAX starts its threads.

    What the process holds is then the most that it ever used, never less.

    Returns:
        False where nothing was changed: the machine has accelerators, whose steps use memory of their own, or malloc is
        not glibc's.
    """
    if _has_accelerator(root):
        return False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not os.confstr('CS_GNU_LIBC_VERSION'):
            return False
        mallopt = ctypes.CDLL(None).mallopt
        # One heap for all threads, as only that one can grow to any size; no block outside of it; never smaller.
        settings = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: _GROWTH}
        return all([mallopt(key, value) for key, value in settings.items()])
    return False


def _has_accelerator(root: Path) -> bool:
    return os.environ.get('JAX_PLATFORMS') != 'cpu' and any((root / name).exists() for name in _ACCELERATORS)
