"""Counts the bytes of device memory that the kernels of a compiled GPU program read and write.

An array that a kernel reads several times counts once, and nothing is assumed to stay in a cache between kernels.
Slices and updates in place count with the size of the slice. Everything is multiplied by the trip counts of the
enclosing loops.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from maxlm.model.attention.cudnn import MORE_LISTS
from maxlm.planning.compiled.hlo import Computation, Instruction, Module
from maxlm.planning.compiled.matmuls import is_library_product, product_flops
from maxlm.planning.compiled.trip_counts import Scope, trip_count
from maxlm.planning.estimate.transfers import KINDS

PRODUCTS, ATTENTION, COMMUNICATION = 'matrix products', 'attention kernels', 'communication'
ROUNDING = 'rounding to fp8'
EXPERTS = 'inputs and outputs of experts'
# Causes of traffic by name of a scope (`jax.named_scope`) in the metadata of an instruction. The last scope of a name
# counts, since scopes are nested.
SCOPES = {
    'norm': 'norm',
    'activation': 'activation',
    'loss': 'loss',
    'optimizer': 'optimizer',
    'cast': 'casts',
    'gradient_sum': 'gradient sums',
    'attention': 'attention inputs and outputs',
    'experts': EXPERTS,
    'fp8': ROUNDING,
}
_SCOPE = re.compile(rf'(?:^|[/(])({"|".join(SCOPES)})(?=[/)]|$)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# Opcodes that move no data, or whose data is counted elsewhere.
_FREE = frozenset(
    {
        *('parameter', 'get-tuple-element', 'tuple', 'bitcast', 'constant', 'after-all', 'partition-id', 'replica-id'),
        *('optimization-barrier', 'iota', 'add-dependency', 'opt-barrier'),
    }
)
# Operations that update an array in place, and the index of the operand with the new elements.
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}
# Users of a fusion's parameter that read only the elements of their result.
_SLICES = ('slice', 'dynamic-slice', 'gather')
# Users that need as many elements of an operand as are needed of their result.
_ELEMENTWISE = frozenset({'convert', 'copy', 'negate', 'reshape', 'transpose', 'add', 'subtract', 'multiply', 'select'})


class Traffic(NamedTuple):
    """Memory traffic of one kernel of a program.

    Attributes:
        name: name of the instruction.
        cause: a value of `SCOPES`, or a constant such as `PRODUCTS`.
        bytes: bytes read and written by one execution.
        executions: executions per step.
    """

    name: str
    cause: str
    bytes: float
    executions: float

    @property
    def total(self) -> float:
        """Returns the bytes of all executions."""
        return self.bytes * self.executions


def read_traffic(module: Module) -> list[Traffic]:
    """Returns the traffic of each kernel of a compiled GPU program, in the order of the program."""
    return list(_Reader(module).kernels(Scope(module.entry), 1.0))


def bytes_by_cause(kernels: Iterable[Traffic]) -> dict[str, float]:
    """Returns the bytes of each cause, the largest first."""
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kernel.cause] += kernel.total
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def elementwise_kernels(kernels: Iterable[Traffic]) -> list[Traffic]:
    """Returns the kernels other than matrix products, attention and communication."""
    return [kernel for kernel in kernels if kernel.cause not in (PRODUCTS, ATTENTION, COMMUNICATION)]


def elementwise_bytes(kernels: Iterable[Traffic]) -> float:
    """Returns the bytes outside of matrix products, attention kernels and communication."""
    return sum(kernel.total for kernel in elementwise_kernels(kernels))


class _Reader:
    def __init__(self, module: Module) -> None:
        self.module = module
        self._fusion_bytes = functools.cache(self._count_fusion)

    def kernels(self, scope: Scope, times: float) -> Iterator[Traffic]:
        """Yields the kernels of a computation that is executed `times` times."""
        for instruction in scope.computation.values():
            opcode = instruction.opcode
            if opcode == 'while':
                # Handles documents beyond the capacity of a list, so it almost never runs.
                if MORE_LISTS not in instruction.attributes:
                    rounds = trip_count(self.module, instruction, scope)
                    body = self.module.computations[instruction.called['body']]
                    yield from self.kernels(Scope(body, instruction, scope), times * (1 if rounds is None else rounds))
            elif opcode == 'conditional':
                branches = [
                    list(self.kernels(Scope(self.module.computations[name], instruction, scope), times))
                    for name in instruction.called.values()
                ]
                yield from max(branches, key=lambda branch: sum(kernel.total for kernel in branch))
            elif opcode.startswith(('call', 'async-start')):
                name = instruction.called.get('calls') or instruction.called['to_apply']
                yield from self.kernels(Scope(self.module.computations[name], instruction, scope), times)
            elif opcode not in _FREE and not opcode.endswith(('-done', '-update')) and not _is_allocation(instruction):
                size = self._bytes(instruction, scope.computation)
                if size:
                    yield Traffic(instruction.name, self._cause(instruction, scope.computation), size, times)

    def _bytes(self, instruction: Instruction, computation: Computation) -> float:
        opcode = instruction.opcode
        if opcode.startswith('fusion'):
            reads, writes = self._fusion_bytes(instruction.called['calls'])
            return reads + writes
        written = sum(array.bytes for array in instruction.arrays)
        if opcode.startswith('custom-call'):
            # Workspaces are arrays of bytes.
            written = sum(array.bytes for array in instruction.arrays if array.kind not in ('s8', 'u8'))
        if opcode in _SLICES:
            return 2 * written
        if opcode in _UPDATES:
            return 2 * _size(computation[instruction.operands[_UPDATES[opcode]]])
        if opcode.endswith('-start'):
            # The result of an asynchronous operation repeats its operands.
            written /= 2
        return written + sum(_size(computation[name]) for name in dict.fromkeys(instruction.operands))

    def _count_fusion(self, name: str) -> tuple[float, float]:
        """Returns the bytes that a fusion reads and writes."""
        fused = self.module.computations[name]
        users: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in fused.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)

        @functools.cache
        def fraction(name: str) -> float:
            """Returns the fraction of an array's elements that the fusion computes or reads."""
            if fused[name].is_root:
                return 1.0
            needed = 0.0
            for user in users[name]:
                if user.opcode in _SLICES and user.operands[0] == name:
                    needed += fraction(user.name) * user.arrays[0].size / max(1, fused[name].arrays[0].size)
                elif user.opcode in _ELEMENTWISE or user.opcode == 'bitcast':
                    needed += fraction(user.name)
                elif user.opcode not in _UPDATES or user.operands[0] != name:
                    return 1.0
            return min(1.0, needed)

        def is_updated_in_place(instruction: Instruction) -> bool:
            updated = fused[instruction.operands[0]]
            while updated.opcode == 'bitcast':
                updated = fused[updated.operands[0]]
            # A scatter into an array that the fusion computes writes all of it.
            return instruction.opcode != 'scatter' or updated.opcode == 'parameter'

        def written(instruction: Instruction) -> float:
            while instruction.opcode == 'bitcast':
                instruction = fused[instruction.operands[0]]
            if instruction.opcode in _UPDATES and is_updated_in_place(instruction):
                return _size(fused[instruction.operands[_UPDATES[instruction.opcode]]])
            return _size(instruction)

        roots = [fused[operand] for operand in fused.root.operands] if fused.root.opcode == 'tuple' else [fused.root]
        parameters = [instruction for instruction in fused.values() if instruction.opcode == 'parameter']
        # A parameter that is returned as it is needs no kernel.
        reads = sum(fraction(parameter.name) * _size(parameter) for parameter in parameters)
        return reads, sum(written(root) for root in roots if root.opcode != 'parameter')

    def _cause(self, instruction: Instruction, computation: Computation) -> str:
        opcode = instruction.opcode
        if opcode.removesuffix('-start') in KINDS:
            return COMMUNICATION
        if self._is_product(instruction, computation):
            return PRODUCTS
        scope, root = self._scope(instruction), self._root(instruction)
        if opcode.startswith('custom-call'):
            return PRODUCTS if scope == EXPERTS else scope if scope in (SCOPES['norm'], ROUNDING) else ATTENTION
        if root.opcode == 'dynamic-update-slice' or opcode in ('dynamic-slice', 'dynamic-update-slice'):
            return 'saved activations'
        if opcode in ('copy', 'copy-start', 'transpose') or root.opcode in ('copy', 'transpose', 'concatenate'):
            return scope or 'copies and concatenations'
        return scope or ('fills' if root.opcode == 'broadcast' else 'other')

    def _scope(self, instruction: Instruction) -> str:
        """Returns the cause of a kernel, or of most of its operations if its result has none; '' if none has one."""

        def scope(operation: Instruction) -> str:
            name = _OP_NAME.search(operation.attributes)
            scopes = _SCOPE.findall(name.group(1)) if name else []
            return SCOPES[scopes[-1]] if scopes else ''

        if not scope(instruction) and instruction.opcode.startswith('fusion'):
            fused = self.module.computations[instruction.called['calls']]
            counts = Counter(filter(None, map(scope, fused.values())))
            return counts.most_common(1)[0][0] if counts else ''
        return scope(instruction)

    def _is_product(self, instruction: Instruction, computation: Computation) -> bool:
        if is_library_product(instruction) or instruction.opcode in ('dot', 'convolution'):
            return True
        if not instruction.opcode.startswith('fusion'):
            return False
        fused = self.module.computations[instruction.called['calls']]
        return any(
            inner.opcode in ('dot', 'convolution')
            and product_flops(inner, [array for name in inner.operands for array in fused[name].arrays]) > 0
            for inner in fused.values()
        )

    def _root(self, instruction: Instruction) -> Instruction:
        """Returns the operation whose result a fusion returns, or the instruction itself."""
        if not instruction.opcode.startswith('fusion'):
            return instruction
        fused = self.module.computations[instruction.called['calls']]
        root = fused.root
        while root.opcode in ('tuple', 'bitcast') and root.operands:
            root = fused[root.operands[0]]
        return root


def _is_allocation(instruction: Instruction) -> bool:
    """Returns True for the custom call of `jax.lax.empty`, which writes nothing."""
    return 'custom_call_target="AllocateBuffer"' in instruction.attributes


def _size(instruction: Instruction) -> float:
    return sum(array.bytes for array in instruction.arrays)
