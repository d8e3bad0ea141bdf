"""One of two processes that look for a directory in common: `python -m tests.runtime.programs_pair DIRECTORY`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# As for a user who has told JAX nothing.
os.environ.pop('JAX_COMPILATION_CACHE_DIR', None)

import jax
import jax.numpy as jnp

from maxlm.runtime.compile_cache import SUFFIX, keep_programs
from maxlm.runtime.distributed import join
from maxlm.runtime.peers import Peers


def main(directory):
    """Prints what each case has come to, as JSON in the last line."""
    # JAX was imported before, where the process was forked.
    jax.config.update('jax_compilation_cache_dir', None)
    join()
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
    with Peers():
        for name, given in cases.items():
            keep_programs(str(given))
            kept[name] = jax.config.jax_compilation_cache_dir
            jax.config.update('jax_compilation_cache_dir', None)
        jax.config.update('jax_compilation_cache_dir', kept['the same'])
        jax.jit(lambda x: x * 3 + process)(jnp.ones(5)).block_until_ready()
    print(json.dumps([kept, sorted(path.name for path in directory.glob(f'*/*{SUFFIX}'))]))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
