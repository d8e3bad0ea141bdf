"""Runs processes that use the compilation cache; `tests.forking` starts them with the directory."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from maxlm.runtime.compilation_cache import SUFFIX, enable_compilation_cache
from maxlm.runtime.heartbeat import Heartbeats
from maxlm.runtime.initialize import initialize


def compile_and_print():
    """Compiles two functions with the cache in the directory, and prints their results."""
    enable_compilation_cache(sys.argv[1])
    x = jnp.linspace(0.1, 0.9, 64).reshape(8, 8)
    for factor in (2, 3):
        print(jax.jit(lambda x, factor=factor: jnp.sin(x @ x) * factor)(x).tolist())


def main():
    """Enables the cache with several directories in two processes, and prints the chosen directories as JSON."""
    directory = Path(sys.argv[1])
    initialize()
    process = jax.process_index()
    (directory / 'file').write_text('not a directory')
    cases = {
        'each its own': directory / f'own_{process}',
        'not the first': directory / ('file' if process == 0 else 'own_1'),
        'not the second': directory / ('file' if process == 1 else 'own_0'),
        'none': '',
        'the same': directory / 'shared',
    }
    chosen = {}
    with Heartbeats():
        for name, cache_dir in cases.items():
            enable_compilation_cache(str(cache_dir))
            chosen[name] = jax.config.jax_compilation_cache_dir
            jax.config.update('jax_compilation_cache_dir', None)
        jax.config.update('jax_compilation_cache_dir', chosen['the same'])
        jax.jit(lambda x: x * 3 + process)(jnp.ones(5)).block_until_ready()
    print(json.dumps([chosen, sorted(path.name for path in directory.glob(f'*/*{SUFFIX}'))]))
