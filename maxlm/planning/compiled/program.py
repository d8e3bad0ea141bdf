"""Counts transfers, matrix-product operations and kernel calls of one execution of a compiled program.

Everything is multiplied by the trip counts of the enclosing loops. XLA's own `cost_analysis` counts the body of a loop
once, and reports nothing for GPUs and nothing about transfers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from maxlm.model.attention.cudnn import MORE_LISTS
from maxlm.planning.compiled.hlo import Array, Computation, Instruction, Module, parse_hlo
from maxlm.planning.compiled.matmuls import is_library_product, product_flops
from maxlm.planning.compiled.replica_groups import find_groups, find_pairs
from maxlm.planning.compiled.traffic import Traffic, read_traffic
from maxlm.planning.compiled.trip_counts import Scope, trip_count
from maxlm.planning.estimate.transfers import KINDS, Transfer

# Custom calls that annotate a TPU program and do no work.
_NOTES = frozenset(
    {
        'AllocateBuffer',
        'AssumeGatherIndicesInBound',
        'AsyncCollectiveDone',
        'AsyncCollectiveStart',
        'ConcatBitcast',
        'GatherScatterIndicesBitpacked',
    }
)
# Call targets that all kernels of a kind share; the instruction's name then identifies the kernel.
_SHARED_TARGETS = frozenset({'tpu_custom_call', 'mosaic_gpu_v2', '__gpu$xla.gpu.triton'})
# Attribute of a fusion that starts a collective, which later fusions with products continue.
_STARTS_CHAIN = 'custom_call_target="AsyncCollectiveStart"'


@dataclasses.dataclass
class Program:
    """The work of one device in one execution of a program.

    Attributes:
        transfers: one per collective instruction. An instruction that sends several arrays counts once, with the bytes
            of all. `is_async` is True if a product, a kernel, or a loop of these runs between its start and its end;
            elementwise work is too short to count.
        flops: operations of matrix products, two per multiply-add, including recomputation in the backward pass.
        kernels: number of custom calls by target: kernels of cuDNN or Pallas, whose products are not in `flops`.
        unknown_loops: loops with counted work whose trip count cannot be determined; they count as one iteration.
        traffic: memory traffic by kernel, for a GPU only. In a TPU's program, many arrays are in on-chip memory.
        rematerialized: number of instructions that XLA duplicated to save memory, which compute a value twice.
        has_ragged_exchange: devices exchange numbers of rows that depend on the data, which `transfers` does not
            contain.
    """

    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    flops: float = 0.0
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)
    traffic: list[Traffic] = dataclasses.field(default_factory=list)
    rematerialized: int = 0
    has_ragged_exchange: bool = False

    @property
    def is_empty(self) -> bool:
        """Returns True if nothing was counted."""
        return not (self.transfers or self.flops or self.kernels)

    def add(self, other: Program, times: float = 1) -> None:
        """Adds another program's work `times` times."""
        self.transfers += [transfer._replace(count=transfer.count * times) for transfer in other.transfers]
        self.flops += times * other.flops
        for name, count in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0) + times * count
        self.unknown_loops += other.unknown_loops


def read_program(text: str, mesh_sizes: Mapping[str, int], *, platform: str = '') -> Program:
    """Counts the work of one execution of a compiled program on each device.

    Args:
        text: `compiled.as_text()` of the CPU, GPU or TPU backend.
        mesh_sizes: devices along each axis of the mesh that the program was compiled for, in the order of the axes.
        platform: platform of the program. `gpu` counts the memory traffic too.

    Raises:
        ValueError: the text is not an XLA program, or its number of devices differs from the mesh's.
    """
    module = parse_hlo(text)
    if module.num_partitions != math.prod(mesh_sizes.values()):
        raise ValueError(
            f'the program is for {module.num_partitions} devices, but the mesh is {dict(mesh_sizes)}; '
            'pass the mesh that it was compiled for'
        )
    program = _Reader(module, tuple(mesh_sizes.items())).count(Scope(module.entry))
    # XLA appends this to the names of instructions that it duplicates.
    program.rematerialized = sum(
        '.remat' in name for computation in module.computations.values() for name in computation
    )
    program.has_ragged_exchange = any(
        instruction.opcode.startswith('ragged-all-to-all')
        for computation in module.computations.values()
        for instruction in computation.values()
    )
    if platform == 'gpu':
        program.traffic = read_traffic(module)
    return program


class _Reader:
    """Adds up a module's computations from the innermost to the entry."""

    def __init__(self, module: Module, mesh: tuple[tuple[str, int], ...]) -> None:
        self.module = module
        self.mesh = mesh
        # Cached because fused computations have neither loops nor calls, so their count does not depend on the caller.
        self._fusion = functools.cache(self._count_fusion)

    def count(self, scope: Scope) -> Program:
        """Returns the work of one execution of a computation."""
        parts = {
            name: self._one(instruction, scope)
            for name, instruction in scope.computation.items()
            if instruction.called or instruction.opcode in _COUNTED
        }
        parts = {name: part for name, part in parts.items() if not part.is_empty}
        starts = [name for name in parts if _is_start(scope.computation[name]) and parts[name].transfers]
        for name, is_hidden in _hidden(scope.computation, starts, parts).items():
            parts[name].transfers = [transfer._replace(is_async=is_hidden) for transfer in parts[name].transfers]
        total = Program()
        for part in parts.values():
            total.add(part)
        return total

    def _one(self, instruction: Instruction, scope: Scope) -> Program:
        """Returns the work of an instruction, including the computations that it calls."""
        called = instruction.called
        if instruction.opcode == 'while':
            return self._loop(instruction, scope)
        if instruction.opcode == 'conditional':
            branches = [
                self.count(Scope(self.module.computations[name], instruction, scope)) for name in called.values()
            ]
            # The branch depends on the data and the device. All devices wait for the branch with the most work.
            return max(branches, key=lambda branch: (branch.flops, sum(transfer.sent for transfer in branch.transfers)))
        total = Program()
        if instruction.opcode.endswith(('-done', '-update')):
            # A collective is counted at its start.
            return total
        if instruction.opcode.startswith('fusion'):
            total.add(self._fusion(called['calls']))
        elif instruction.opcode.startswith(('call', 'async-start')):
            name = called.get('calls') or called['to_apply']
            total.add(self.count(Scope(self.module.computations[name], instruction, scope)))
        elif _kind(instruction):
            transfer = self._transfer(instruction, scope.computation)
            total.transfers += [transfer] if transfer else []
        elif instruction.opcode in ('dot', 'convolution') or is_library_product(instruction):
            total.flops = product_flops(instruction, _operands(instruction, scope.computation))
        elif instruction.opcode.startswith('custom-call'):
            kernel = _kernel(instruction)
            total.kernels |= {kernel: 1.0} if kernel else {}
        return total

    def _loop(self, loop: Instruction, scope: Scope) -> Program:
        if MORE_LISTS in loop.attributes:
            # Handles documents beyond the capacity of a list, so it almost never runs.
            return Program()
        rounds = trip_count(self.module, loop, scope)
        each = self.count(Scope(self.module.computations[loop.called['condition']], loop, scope))
        each.add(self.count(Scope(self.module.computations[loop.called['body']], loop, scope)))
        if rounds is None and not each.is_empty:
            each.unknown_loops.append(loop.name)
        total = Program()
        total.add(each, 1 if rounds is None else rounds)
        return total

    def _count_fusion(self, name: str) -> Program:
        return self.count(Scope(self.module.computations[name]))

    def _transfer(self, instruction: Instruction, computation: Computation) -> Transfer | None:
        """Returns the transfer of a collective; None if it sends nothing or continues another one."""
        kind = _kind(instruction)
        assert kind is not None
        is_chained = 'chain_id=' in instruction.attributes
        if is_chained and not any(_STARTS_CHAIN in other.attributes for other in computation.values()):
            return None
        if kind == 'collective-permute':
            pairs = instruction.attribute(r'source_target_pairs=(\{.*?\}\}|\{\})')
            groups = find_pairs(pairs or '', self.mesh)
        else:
            groups = find_groups(instruction.attribute(r'replica_groups=(.*)') or '{}', self.mesh)
        size = sum(array.bytes for array in _operands(instruction, computation))
        if kind == 'all-gather':
            size *= groups.size
        return Transfer(kind, groups.axes, groups.size, size, is_async=is_chained) if groups.size > 1 else None


_COUNTED = {'dot', 'convolution', 'custom-call', 'custom-call-start', *KINDS, *(f'{kind}-start' for kind in KINDS)}


def _kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix('-start')
    return kind if kind in KINDS else None


def _operands(instruction: Instruction, computation: Computation) -> list[Array]:
    return [array for name in instruction.operands for array in computation[name].arrays]


def _kernel(instruction: Instruction) -> str | None:
    target = instruction.attribute(r'custom_call_target="([^"]*)"') or ''
    if target in _NOTES:
        return None
    return f'{target} {instruction.name.split(".")[0]}' if target in _SHARED_TARGETS else target


def _is_start(instruction: Instruction) -> bool:
    return instruction.opcode.endswith('-start')


def _hidden(computation: Computation, starts: list[str], parts: dict[str, Program]) -> dict[str, bool]:
    """Returns, by start of a collective, True if a product or a kernel runs before it is waited for."""
    if not starts:
        return {}
    started: dict[str, float] = {}
    done = 0.0
    hidden = dict.fromkeys(starts, False)
    for name, instruction in computation.items():
        if name in hidden:
            started[name] = done
        elif instruction.opcode.endswith(('-done', '-update')) and instruction.operands[0] in started:
            start = instruction.operands[0]
            if instruction.opcode.endswith('-done'):
                hidden[start] = done > started[start]
            else:
                started[name] = started[start]
        elif name in parts:
            done += bool(parts[name].flops or parts[name].kernels)
    return hidden
