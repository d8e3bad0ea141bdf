"""Compiles the products of `cpu_kernels.cc` for this processor, and registers them as functions of XLA programs.

The library is compiled once per machine, in seconds, and kept in the compilation cache, which has checksums and is
private. It is tested with known values before it is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from maxlm.log import logger
from maxlm.runtime.compilation_cache import enabled_cache

SOURCE = Path(__file__).with_suffix('.cc')
# Functions of the library by the name under which XLA calls them.
HANDLERS = {'maxlm_int8_product': 'Int8ProductHandler', 'maxlm_int4_product': 'Int4ProductHandler'}
COMPILERS = ('c++', 'g++', 'clang++')
FLAGS = ('-O3', '-march=native', '-std=c++17', '-shared', '-fPIC', '-fno-math-errno', '-DNDEBUG', '-w')
TIMEOUT = 300


_lock = threading.Lock()


def register_cpu_kernels() -> bool:
    """Registers the functions in `HANDLERS` for XLA programs on CPUs, once per process.

    Returns:
        False if they cannot be compiled or give wrong values here. A warning then says why.
    """
    # XLA refuses a second library, which another thread would load.
    with _lock:
        return _register()


@functools.cache
def _register() -> bool:
    try:
        library = _load(_compiled_library())
        for target, handler in HANDLERS.items():
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, handler)), platform='cpu')
        reason = '' if _is_correct() else 'the compiled functions give wrong values on this processor'
    except (_CompilerError, OSError, AttributeError) as error:
        reason = str(error)
    if reason:
        logger.warning(f'products with inputs in 8 bits run through XLA, which is several times slower: {reason}')
    return not reason


class _CompilerError(Exception):
    """The library cannot be compiled."""


def _compiled_library() -> bytes:
    """Returns the shared library, from the compilation cache if possible."""
    source = SOURCE.read_bytes()
    parts = (source, ' '.join(FLAGS), version('jaxlib'), platform.machine(), _processor_features())
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    key, cache = f'cpu-kernels-{digest}', enabled_cache()
    found = cache.get(key) if cache else None
    if found is None:
        found = _compile(_find_compiler(os.environ))
        if cache:
            cache.put(key, found)
    return found


def _find_compiler(environment: Mapping[str, str]) -> list[str]:
    """Returns the command of a compiler. CXX may contain options and a program before it, as in `ccache g++ -m64`."""
    try:
        commands = [shlex.split(environment.get('CXX', ''))]
    except ValueError as error:
        raise _CompilerError(f'CXX={environment["CXX"]}: {error}; set it to a C++ compiler') from None
    commands = commands if commands[0] else [[name] for name in COMPILERS]
    for program, *options in commands:
        if found := shutil.which(program):
            return [found, *options]
    names = ', '.join(program for program, *_ in commands)
    raise _CompilerError(f'no C++ compiler found ({names}); install one, e.g. apt install g++')


def _compile(compiler: Sequence[str]) -> bytes:
    """Compiles the source. Raises `_CompilerError` with the first error of the compiler."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / 'kernels.so'
        command = [*compiler, *FLAGS, '-I', jax.ffi.include_dir(), str(SOURCE), '-o', str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors='replace', timeout=TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise _CompilerError(f'{shlex.join(compiler)} did not end within {TIMEOUT} s') from error
        if done.returncode:
            lines = done.stderr.splitlines() or ['no message']
            first = next((line for line in lines if 'error' in line), lines[0])
            raise _CompilerError(f'{shlex.join(compiler)} failed with exit code {done.returncode}: {first.strip()}')
        return output.read_bytes()


def _load(library: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / 'kernels.so'
        path.write_bytes(library)
        # The file may be deleted after it has been loaded.
        return ctypes.CDLL(str(path))


def _processor_features() -> str:
    """Returns the instruction sets of this processor, for which the library is compiled."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(('flags', 'Features'))), '')


def _is_correct() -> bool:
    """Compares the functions with products of NumPy, for numbers of rows and outputs that use all parts of the code."""
    rng = np.random.default_rng(0)
    for num_rows, num_outputs in ((1, 80), (2, 33), (3, 16), (4, 33), (7, 80)):
        # The scale of each block of the input is 1, so the inputs are their own codes.
        x_MI = rng.integers(-127, 128, (num_rows, 64)).astype(np.float32)
        x_MI[:, ::32] = 127
        num_panels = -(-num_outputs // 16)
        scales = rng.uniform(0.5, 2, (num_panels, 2, 16)).astype(np.float32)
        scales_IO = np.repeat(scales.transpose(1, 0, 2).reshape(2, -1), 32, axis=0)
        bytes_8 = rng.integers(0, 256, (num_panels, 16, 16, 4), np.uint8)
        # −128 is no code.
        bytes_8[bytes_8 == 128] = 127
        bytes_4 = rng.integers(0, 256, (num_panels, 8, 16, 4), np.uint8)
        nibbles = np.stack([bytes_4 & 15, bytes_4 >> 4], axis=2).astype(np.int32) - 8
        kernels: list[tuple[np.ndarray, np.ndarray]] = [
            (bytes_8, bytes_8.view(np.int8).transpose(1, 3, 0, 2)),
            (bytes_4, nibbles.transpose(1, 2, 4, 0, 3)),
        ]
        for target, (packed, codes) in zip(HANDLERS, kernels, strict=True):
            expected = (x_MI.astype(np.float64) @ (codes.reshape(64, -1) * scales_IO))[:, :num_outputs]
            call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(expected.shape, np.float32))
            if not np.allclose(call(x_MI, packed, scales), expected, rtol=1e-5, atol=1e-1):
                return False
    return True
