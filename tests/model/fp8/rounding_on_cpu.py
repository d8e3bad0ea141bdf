"""The rounding kernel as formulas, which compile faster than an interpreted kernel."""

import jax.numpy as jnp

from maxlm.model.fp8 import rounding_kernel


def use_formulas(monkeypatch):
    """Replaces the kernel by formulas. Returns the list of the numbers of matrices that are rounded from now on."""
    traced = []

    def run(arrays, *, function, roundings, names, platform):
        traced.append(len(roundings))
        inputs = [x for name, x in arrays.items() if name.startswith('input')]
        results = function(*(x.astype(jnp.float32) for x in inputs))
        found = {}
        for number, (x, rounding) in enumerate(zip(results, roundings, strict=True)):
            x = x.astype(inputs[0].dtype).astype(jnp.float32)
            top = float(jnp.finfo(rounding.kind).max)
            codes = jnp.clip(x / arrays[f'scale{number}'][0], -top, top).astype(rounding.kind)
            found |= {f'codes{number}': codes, f'transposed{number}': codes.T, f'sums{number}': x.sum(0)[None]}
            found[f'largest{number}'] = jnp.abs(x).max()[None, None]
        return {name: found[name] for name in names}

    monkeypatch.setattr(rounding_kernel, '_run', run)
    return traced
