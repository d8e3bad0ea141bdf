"""Versions of libraries that compute wrong results on GPUs, according to public reports.

The table contains faults that a run of maxlm can meet. The tests in `maxlm.training.known_answers` find others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from maxlm.hardware.identity import installed_version

# Oldest version of cuDNN that supports entries of length 0 in its list of documents.
CUDNN_WITH_EMPTY_DOCUMENTS = (9, 25)


class Libraries(NamedTuple):
    """Versions of the libraries of a GPU.

    Attributes:
        jaxlib: version, e.g. (0, 11, 1).
        cuda: major version of CUDA that JAX's plugin uses; 0: no plugin.
        cudnn: version; (): unknown.
    """

    jaxlib: tuple[int, ...]
    cuda: int
    cudnn: tuple[int, ...]


class KnownFault(NamedTuple):
    """A fault of a library.

    Attributes:
        affects: returns True for the affected versions.
        effect: wrong results, and where they were seen.
        source: public report.
        remedy: what to do.
    """

    affects: Callable[[Libraries], bool]
    effect: str
    source: str
    remedy: str


NEWER = 'install jax 0.11.2 or later, which needs Python 3.12'
FAULTS = (
    KnownFault(
        lambda found: found.cuda == 13 and (0, 11, 0) <= found.jaxlib <= (0, 11, 1),
        'functions outside of jit return wrong values and NaN, seen on an RTX A6000',
        'https://github.com/jax-ml/jax/issues/40633',
        'install jax 0.11.2 or later, or 0.10.2',
    ),
    KnownFault(
        lambda found: found.jaxlib < (0, 11, 1),
        'nested concatenations can have wrong rows, seen on an RTX 3080 Ti and on consumer Blackwell GPUs',
        'https://github.com/jax-ml/jax/issues/40588',
        NEWER,
    ),
)
EMPTY_DOCUMENTS = KnownFault(
    lambda found: () < found.cudnn < CUDNN_WITH_EMPTY_DOCUMENTS,
    'attention can return NaN for lists of documents with entries of length 0, which maxlm passes',
    'https://github.com/NVIDIA/cudnn-frontend/issues/943',
    'install cuDNN 9.25 or later, or set model.attention=xla',
)


def known_faults(found: Libraries, *, has_document_lists: bool) -> list[KnownFault]:
    """Returns the faults of these libraries. `has_document_lists`: the run uses cuDNN's lists of documents."""
    rows = (*FAULTS, EMPTY_DOCUMENTS) if has_document_lists else FAULTS
    return [fault for fault in rows if fault.affects(found)]


def installed_libraries(cudnn: str) -> Libraries:
    """Returns the installed versions. `cudnn` is the loaded version; '': unknown."""
    plugins = {number for number in (12, 13) if installed_version(f'jax-cuda{number}-plugin')}
    return Libraries(_numbers(installed_version('jaxlib') or ''), max(plugins, default=0), _numbers(cudnn))


def describe(fault: KnownFault) -> str:
    """Returns a fault as one line."""
    return f'{fault.effect} ({fault.source}); {fault.remedy}'


def _numbers(version: str) -> tuple[int, ...]:
    """Parses the leading numbers of a version: `0.11.1` → (0, 11, 1), `0.11.0.dev1` → (0, 11, 0)."""
    numbers = []
    for part in version.split('.'):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
