"""Runs processes that use the compilation cache; `tests.forking` starts them with the directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from maxlm.runtime.compilation_cache import SUFFIX, enable_compilation_cache
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.runtime.initialize import initialize


def compile_and_print():
    """Compiles two functions, which the cache in the directory keeps, and prints their results."""
    enable_compilation_cache(sys.argv[1])
    x = jnp.linspace(0.1, 0.9, 64).reshape(8, 8)
    for factor in (2, 3):
        print(jax.jit(lambda x, factor=factor: jnp.sin(x @ x) * factor)(x).tolist())


def main():
    """Chooses a common cache directory with another process, and prints the result of each case as JSON at the end."""
    directory = Path(sys.argv[1])
    initialize()
    process = jax.process_index()
    (directory / 'of_one').write_text('a file, no directory')
    cases = {
        'each its own': directory / f'own_{process}',
        'not the first': directory / ('of_one' if process == 0 else 'own_1'),
        'not the second': directory / ('of_one' if process == 1 else 'own_0'),
        'none': '',
        'the same': directory / 'shared',
    }
    kept = {}
    with Heartbeats():
        for name, given in cases.items():
            enable_compilation_cache(str(given))
            kept[name] = jax.config.jax_compilation_cache_dir
            jax.config.update('jax_compilation_cache_dir', None)
        jax.config.update('jax_compilation_cache_dir', kept['the same'])
        jax.jit(lambda x: x * 3 + process)(jnp.ones(5)).block_until_ready()
    print(json.dumps([kept, sorted(path.name for path in directory.glob(f'*/*{SUFFIX}'))]))
