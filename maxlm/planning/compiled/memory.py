"""Memory of a compiled step by kind, and the memory in the compiler's error for a step that does not fit."""

from __future__ import annotations

import re
from typing import NamedTuple

from maxlm.config.schema import Config
from maxlm.planning.estimate.memory import Memory, estimate_memory
from maxlm.planning.estimate.state_bytes import replay_bytes, state_bytes
from maxlm.training.compile import CompiledStep
from maxlm.training.state import TrainState

# "the total memory required for HLO temporaries (81.26G) exceeds available HBM (30.75G)".
OVERFLOW = re.compile(r'required[^()]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)')
UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class Overflow(NamedTuple):
    """Sizes in a TPU compiler's out-of-memory error, in bytes.

    Attributes:
        needed: bytes of the complete program, including the state, although the message calls them temporaries.
        available: bytes that a program may use.
    """

    needed: int
    available: int


def memory_of(
    compiled: CompiledStep, config: Config, abstract: TrainState, capability: tuple[int, int] | None = None
) -> Memory:
    """Returns the compiler's memory by kind, or the estimate if the compiler reports none.

    The state is exact, from its shardings, and so is the total. Temporary memory is divided as in the estimate, which
    needs `capability`.
    """
    state = state_bytes(abstract)
    estimate = estimate_memory(config, compiled.platform, capability, state)
    sizes, total = compiled.memory_bytes(), compiled.total_bytes()
    if sizes is None or total is None:
        return estimate
    # A CPU has a single memory, and its total includes the part that would be on the host.
    on_host = sizes.get('host', state.host)
    left = total - state.parameters - state.moments - state.average - estimate.batch
    left = max(0, left if 'host' in sizes else left - state.host)
    gradients = min(estimate.gradients, left)
    activations = min(estimate.activations, left - gradients)
    return estimate._replace(
        gradients=gradients,
        activations=activations,
        # Includes the padding of a TPU's state to tiles.
        temporary=left - gradients - activations,
        host=on_host + replay_bytes(config).host,
        is_estimate=False,
    )


def overflow_of(error: Exception) -> Overflow | None:
    """Parses a compiler's out-of-memory error; returns None for another error."""
    found = OVERFLOW.search(str(error))
    if found is None:
        return None
    needed, unit, available, available_unit = found.groups()
    return Overflow(round(float(needed) * UNITS[unit]), round(float(available) * UNITS[available_unit]))
