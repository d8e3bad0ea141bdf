"""maxlm trains, evaluates and serves language models from raw text, with one config file.

>>> import maxlm
>>> model = maxlm.load('runs/tiny')  # doctest: +SKIP
>>> model.generate('import ', max_tokens=16)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = '0.2.0'
# Names of the Python API, and the modules that define them. They are imported at their first use, so that
# `import maxlm` stays fast.
_EXPORTS = {'Model': ('maxlm.api.model', 'Model'), 'load': ('maxlm.api.model', 'Model')}
__all__ = ['Model', '__version__', 'load']


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module, attribute = _EXPORTS[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
