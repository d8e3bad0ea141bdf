"""Estimates how much communication of a compiled TPU program overlaps with computation.

The program is simulated in its scheduled order with two clocks. The clock of the device advances with each instruction.
The clock of the links runs one collective after the other, from the instruction that starts it. If the device needs a
collective that is not done, it waits; the remaining communication is hidden. Computation runs at the peak of the
datasheet and links below their peak, so real hardware hides more.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from maxlm.hardware.chips import Chip
from maxlm.planning.compiled.hlo import Array, Computation, Instruction, Module, parse_hlo
from maxlm.planning.compiled.matmuls import product_flops
from maxlm.planning.compiled.replica_groups import find_groups, find_pairs
from maxlm.planning.compiled.trip_counts import Scope, trip_count
from maxlm.planning.estimate.roofline import efficiency_of, transfer_time
from maxlm.planning.estimate.transfers import KINDS, Transfer

# Fusions that start and end a collective; fusions with products between them continue it.
_FIRST, _LAST = 'custom_call_target="AsyncCollectiveStart"', 'custom_call_target="AsyncCollectiveDone"'
# The layout of an array in on-chip memory ends with the number of its memory space.
_ON_CHIP = re.compile(r'S\([1-9]\d*\)')
_LAID_OUT = re.compile(r'\b[a-z]+\d*[a-z0-9]*\[[\d,<=]*\](?:\{[^}]*\})?')
# Instructions that only rename values or write nothing.
_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'opt-barrier', 'partition-id'}


class Overlap(NamedTuple):
    """Overlap of all collectives of one kind in a step, on each device.

    Attributes:
        seconds: time on the links, without concurrency.
        hidden: part of `seconds` that overlaps with computation.
        count: number of executions.
        count_async: number of executions that start before the device waits for them.
    """

    seconds: float = 0.0
    hidden: float = 0.0
    count: float = 0.0  # type: ignore[assignment]
    count_async: float = 0.0

    @property
    def share(self) -> float:
        """Returns the hidden fraction of the time, from 0 to 1; 1 if there is no communication."""
        return self.hidden / self.seconds if self.seconds else 1.0

    def plus(self, other: Overlap, times: float = 1) -> Overlap:
        """Returns the sum with another overlap that occurs `times` times."""
        return Overlap(*(mine + times * more for mine, more in zip(self, other, strict=True)))


class _Played(NamedTuple):
    """One execution of a computation: seconds of the device including waits, and overlap by kind."""

    seconds: float
    by_kind: dict[str, Overlap]


@dataclasses.dataclass
class _Sending:
    """A collective in progress.

    Attributes:
        kind: kind of collective.
        begin: time at which the links begin it.
        end: time at which the links finish it.
        waited: seconds during which the device waited between `begin` and `end`.
    """

    kind: str
    begin: float
    end: float
    waited: float = 0.0


def read_overlap(
    text: str, mesh_sizes: Mapping[str, int], chip: Chip, *, num_devices: int, num_islands: int = 1
) -> dict[str, Overlap]:
    """Returns the overlap of a compiled program's collectives by kind; `total` is the sum.

    Args:
        text: `compiled.as_text()` of a TPU program.
        mesh_sizes: sizes of the axes of the program's mesh, in order.
        chip: chip of the device.
        num_devices: number of all devices.
        num_islands: number of slices.

    Raises:
        ValueError: the text is not a scheduled XLA program.
    """
    if 'is_scheduled=true' not in text[: text.find('\n')]:
        raise ValueError('a program that is not scheduled does not tell what runs beside what')
    module = parse_hlo(text)
    player = _Player(module, tuple(mesh_sizes.items()), chip, num_devices // num_islands)
    by_kind = player.play(Scope(module.entry)).by_kind
    return {**by_kind, 'total': functools.reduce(Overlap.plus, by_kind.values(), Overlap())}


class _Player:
    """Simulates the computations of a module."""

    def __init__(self, module: Module, mesh: tuple[tuple[str, int], ...], chip: Chip, island: int) -> None:
        self.module, self.mesh, self.chip, self.island = module, mesh, chip, island
        self.flops_of = functools.cache(self._flops_of)

    def play(self, scope: Scope) -> _Played:
        """Simulates one execution of a computation, until all collectives that it started are done."""
        clock = links = 0.0
        by_kind: dict[str, Overlap] = defaultdict(Overlap)
        # Keys are names of starting instructions, or ids of chains of fusions.
        sending: dict[str, _Sending] = {}

        def start(key: str, transfer: Transfer) -> None:
            nonlocal links
            begin = max(clock, links)
            links = begin + self._transfer_seconds(transfer)
            sending[key] = _Sending(transfer.kind, begin, links)

        def wait(key: str, *, is_async: bool) -> None:
            nonlocal clock
            end = sending[key].end
            for each in sending.values():
                # The device also waits for collectives that precede this one in the queue.
                each.waited += max(0.0, min(end, each.end) - max(clock, each.begin))
            done = sending.pop(key)
            seconds = done.end - done.begin
            by_kind[done.kind] = by_kind[done.kind].plus(Overlap(seconds, max(0.0, seconds - done.waited), 1, is_async))
            clock = max(clock, end)

        for name, instruction in scope.computation.items():
            inner = self._inner(instruction, scope)
            if inner is not None:
                played, rounds = inner
                for kind, overlap in played.by_kind.items():
                    by_kind[kind] = by_kind[kind].plus(overlap, rounds)
                links = max(clock, links) + rounds * sum(overlap.seconds for overlap in played.by_kind.values())
                clock += rounds * played.seconds
                continue
            first, key, last = self._steps(instruction, scope.computation)
            seconds = self._compute_seconds(instruction, scope.computation)
            # The computation of a fusion cannot hide a collective that the fusion itself waits for.
            clock += seconds if last else 0.0
            if first is not None:
                start(key, first)
            clock += 0.0 if last else seconds
            if last and key in sending:
                wait(key, is_async=first is None)
            elif instruction.opcode.endswith('-update') and instruction.operands[0] in sending:
                sending[name] = sending.pop(instruction.operands[0])
        assert not sending, f'started and never waited for: {list(sending)}'
        return _Played(clock, dict(by_kind))

    def _inner(self, instruction: Instruction, scope: Scope) -> tuple[_Played, float] | None:
        """Simulates the body of a loop, call or conditional and returns it with its repetitions; None otherwise."""
        called = instruction.called
        if instruction.opcode == 'while':
            rounds = trip_count(self.module, instruction, scope)
            body = self.play(Scope(self.module.computations[called['body']], instruction, scope))
            return body, 1 if rounds is None else rounds
        if instruction.opcode == 'conditional':
            scopes = (Scope(self.module.computations[name], instruction, scope) for name in called.values())
            branches = [self.play(branch) for branch in scopes]
            # The branch depends on the data. Other devices wait for the longest one.
            return max(branches, key=lambda branch: branch.seconds), 1
        if instruction.opcode == 'call':
            return self.play(Scope(self.module.computations[called['to_apply']], instruction, scope)), 1
        return None

    def _steps(self, instruction: Instruction, computation: Computation) -> tuple[Transfer | None, str, bool]:
        """Returns the transfer that an instruction starts, its key, and True if it waits for that transfer."""
        opcode = instruction.opcode
        if opcode.removesuffix('-start') in KINDS:
            transfer = self._transfer(instruction, computation)
            return transfer, instruction.name, not opcode.endswith('-start')
        if opcode.removesuffix('-done') in (*KINDS, 'async', 'call'):
            return None, instruction.operands[0], True
        called = instruction.called
        # An asynchronous call runs on another core of the chip.
        if opcode not in ('fusion', 'async-start', 'call-start') or not called:
            return None, '', False
        fused = self.module.computations[called.get('calls') or called['to_apply']]
        found = next((part for part in fused.values() if part.opcode in KINDS), None)
        chain = found.attribute(r'chain_id="?([\w.\-]+)') if found else None
        is_last = any(_LAST in part.attributes for part in fused.values())
        if chain:
            is_first = any(_FIRST in part.attributes for part in fused.values())
            return self._transfer(found, fused) if is_first else None, f'chain {chain}', is_last
        # The fusion contains a collective and computation of its inputs or outputs; the device waits for it.
        transfer = self._transfer(found, fused) if found else None
        return transfer, instruction.name, opcode == 'fusion'

    def _transfer(self, instruction: Instruction | None, computation: Computation) -> Transfer | None:
        assert instruction is not None
        kind = instruction.opcode.removesuffix('-start')
        if kind == 'collective-permute':
            pairs = instruction.attribute(r'source_target_pairs=(\{.*?\}\}|\{\})')
            groups = find_pairs(pairs or '', self.mesh)
        else:
            groups = find_groups(instruction.attribute(r'replica_groups=(.*)') or '{}', self.mesh)
        size = sum(array.bytes for array in _operands(instruction, computation))
        size *= groups.size if kind == 'all-gather' else 1
        return Transfer(kind, groups.axes, groups.size, size) if groups.size > 1 else None

    def _transfer_seconds(self, transfer: Transfer) -> float:
        # Only gradient reductions cross slices.
        across = {name: 1 for name, _ in self.mesh}
        return transfer_time(transfer, self.chip, efficiency_of(self.chip), across, self.island)

    def _compute_seconds(self, instruction: Instruction, computation: Computation) -> float:
        """Returns the larger of the times for products and for writes to memory; custom kernels count only writes."""
        if instruction.opcode in _FREE or instruction.opcode.endswith(('-start', '-done', '-update')):
            return 0.0
        flops = 0.0
        if instruction.opcode == 'fusion' and instruction.called:
            flops = self.flops_of(instruction.called['calls'])
        elif instruction.opcode in ('dot', 'convolution'):
            flops = product_flops(instruction, _operands(instruction, computation))
        # An in-place update writes only a part of its result.
        attributes = instruction.attributes
        is_in_place = '"aliasing_operands":{"lists":[{' in attributes or 'dynamic-update' in instruction.name
        written = 0.0 if is_in_place or instruction.opcode in KINDS else _bytes_in_memory(instruction)
        return max(flops / (self.chip.tflops * 1e12), written / self.chip.memory_bandwidth)

    def _flops_of(self, name: str) -> float:
        computation = self.module.computations[name]
        flops = 0.0
        for part in computation.values():
            if part.opcode == 'fusion' and part.called:
                flops += self.flops_of(part.called['calls'])
            elif part.opcode in ('dot', 'convolution'):
                flops += product_flops(part, _operands(part, computation))
        return flops


def _operands(instruction: Instruction, computation: Computation) -> list[Array]:
    return [array for name in instruction.operands for array in computation[name].arrays]


def _bytes_in_memory(instruction: Instruction) -> float:
    """Returns the bytes of its results outside on-chip memory."""
    laid_out = _LAID_OUT.findall(instruction.type)
    return sum(
        array.bytes for array, text in zip(instruction.arrays, laid_out, strict=True) if not _ON_CHIP.search(text)
    )
