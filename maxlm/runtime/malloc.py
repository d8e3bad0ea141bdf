"""Settings of the C memory allocator."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
# Bytes by which the heap grows. A page uses memory only after it is touched.
_GROWTH = 2**26
# Device files of GPUs (NVIDIA, AMD) and TPUs.
_ACCELERATORS = ('dev/nvidia0', 'dev/kfd', 'dev/accel0', 'dev/vfio/0')


def disable_malloc_trim(root: Path = Path('/')) -> bool:
    """Configures glibc's malloc to keep freed memory, which avoids repeated page faults in CPU steps.

    Products of 8-bit weights took four times as long without it. Call it only in the entry point of a command, before
    JAX starts its threads: it affects the entire process, whose resident memory then never shrinks.

    Returns:
        False if nothing was changed, because the machine has accelerators or does not use glibc.
    """
    if _has_accelerator(root):
        return False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not os.confstr('CS_GNU_LIBC_VERSION'):
            return False
        mallopt = ctypes.CDLL(None).mallopt
        # One arena for all threads, because only the main arena can grow without limit; no mmap; no trimming.
        settings = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: _GROWTH}
        return all([mallopt(key, value) for key, value in settings.items()])
    return False


def trim_malloc() -> None:
    """Returns freed memory of glibc's malloc to the operating system, also after `disable_malloc_trim`.

    Call it after phases that free much memory, such as compilation and the restore of a checkpoint.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _has_accelerator(root: Path) -> bool:
    return os.environ.get('JAX_PLATFORMS') != 'cpu' and any((root / name).exists() for name in _ACCELERATORS)
