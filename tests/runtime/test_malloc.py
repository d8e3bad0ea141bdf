"""Tests that memory freed by one step is reused by the next, without page faults."""

import os
import subprocess
import sys

from maxlm.runtime.malloc import disable_malloc_trim
from tests.conftest import ROOT

# Allocates and frees memory like training steps, in a thread, and prints the number of page faults.
PROGRAM = """
import ctypes, resource, sys, threading
from maxlm.runtime.malloc import disable_malloc_trim

kept = disable_malloc_trim() if sys.argv[1] == 'keep' else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def use(times):
    for _ in range(times):
        blocks = [libc.malloc(size * 2**20) for size in (3, 40, 90)]
        for block, size in zip(blocks, (3, 40, 90)):
            ctypes.memset(block, 1, size * 2**20)
        for block in blocks:
            libc.free(block)

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    use(3)
    before = pages()
    use(5)
    print(kept, pages() - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_freed_memory_is_reused():
    found = {}
    for mode in ('keep', 'leave'):
        environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
        command = [sys.executable, '-c', PROGRAM, mode]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        kept, pages = done.stdout.split()
        found[mode] = kept, int(pages)
    assert found['keep'][0] == 'True'
    assert found['keep'][1] < 100
    # Control: by default malloc returns all memory, five times 130 MiB in pages of 4 KiB or partly 2 MiB.
    assert found['leave'][1] > 250


def test_malloc_is_unchanged_on_machines_with_accelerators(monkeypatch, tmp_path):
    monkeypatch.delenv('JAX_PLATFORMS', raising=False)
    (tmp_path / 'dev').mkdir()
    (tmp_path / 'dev' / 'nvidia0').touch()
    assert not disable_malloc_trim(tmp_path)
