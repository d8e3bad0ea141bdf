"""How much of a TPU's communication goes on beside computation, in the order in which a compiled program runs.

The program is played on two clocks: the device's, which goes on with each instruction, and that of its links, which
carry one collective after the other from where it is started. Where the device asks for one that is not there yet, it
waits. What is not waited for is hidden. Computation takes its time at the datasheet's peak and links less than theirs,
so that more is hidden on a machine.
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

# The fusions that start and end a collective which others, with products in them, carry on.
_FIRST, _LAST = 'custom_call_target="AsyncCollectiveStart"', 'custom_call_target="AsyncCollectiveDone"'
# An array in a memory on the chip has its number behind its layout.
_ON_CHIP = re.compile(r'S\([1-9]\d*\)')
_LAID_OUT = re.compile(r'\b[a-z]+\d*[a-z0-9]*\[[\d,<=]*\](?:\{[^}]*\})?')
# Give what they have under another name, or write nothing.
_FREE = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'opt-barrier', 'partition-id'}


class Overlap(NamedTuple):
    """Of all collectives of one kind in a step, on each device."""

    # On the links, one after the other.
    seconds: float = 0.0
    # Of those, beside computation.
    hidden: float = 0.0
    # Executions, and of those the ones that are started before they are waited for.
    count: float = 0.0  # type: ignore[assignment]
    count_async: float = 0.0

    @property
    def share(self) -> float:
        """That is hidden, of the time: 0 … 1; 1 where there is nothing to hide."""
        return self.hidden / self.seconds if self.seconds else 1.0

    def plus(self, other: Overlap, times: float = 1) -> Overlap:
        """With another's, as often as it runs."""
        return Overlap(*(mine + times * more for mine, more in zip(self, other, strict=True)))


class _Played(NamedTuple):
    """One run of a computation."""

    # Of the device, waiting included.
    seconds: float
    by_kind: dict[str, Overlap]


@dataclasses.dataclass
class _Sending:
    """A collective that is on its way."""

    kind: str
    # When the links begin with it, and have done with it.
    begin: float
    end: float
    # How long the device has stood still meanwhile.
    waited: float = 0.0


def read_overlap(
    text: str, mesh_sizes: Mapping[str, int], chip: Chip, *, num_devices: int, num_islands: int = 1
) -> dict[str, Overlap]:
    """What of a compiled program's collectives is hidden, by kind; `total` of all.

    Args:
        text: `compiled.as_text()` for a TPU.
        mesh_sizes: devices along each axis of the mesh that it was compiled for, in the order of the axes.
        chip: the device.
        num_devices: of the whole run.
        num_islands: slices.

    Raises:
        ValueError: the text is no program of XLA's in the order in which it runs.
    """
    if 'is_scheduled=true' not in text[: text.find('\n')]:
        raise ValueError('a program that is not scheduled does not tell what runs beside what')
    module = parse_hlo(text)
    player = _Player(module, tuple(mesh_sizes.items()), chip, num_devices // num_islands)
    by_kind = player.play(Scope(module.entry)).by_kind
    return {**by_kind, 'total': functools.reduce(Overlap.plus, by_kind.values(), Overlap())}


class _Player:
    """Plays a module's computations."""

    def __init__(self, module: Module, mesh: tuple[tuple[str, int], ...], chip: Chip, island: int) -> None:
        self.module, self.mesh, self.chip, self.island = module, mesh, chip, island
        self.flops_of = functools.cache(self._flops_of)

    def play(self, scope: Scope) -> _Played:
        """One run of a computation, which ends when what it started has come."""
        clock = links = 0.0
        by_kind: dict[str, Overlap] = defaultdict(Overlap)
        # By the instruction that starts it, or the number of the chain of fusions that carry it on.
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
                # Others stand before it in the queue, and what is waited for is theirs.
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
            # What is waited for at once is hidden by nothing, be it in a fusion with a product.
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
        """What a loop, a call or a condition runs, and how often; None of any other instruction."""
        called = instruction.called
        if instruction.opcode == 'while':
            rounds = trip_count(self.module, instruction, scope)
            body = self.play(Scope(self.module.computations[called['body']], instruction, scope))
            return body, 1 if rounds is None else rounds
        if instruction.opcode == 'conditional':
            scopes = (Scope(self.module.computations[name], instruction, scope) for name in called.values())
            branches = [self.play(branch) for branch in scopes]
            # Which one runs depends on the data; the longest is what other devices wait for.
            return max(branches, key=lambda branch: branch.seconds), 1
        if instruction.opcode == 'call':
            return self.play(Scope(self.module.computations[called['to_apply']], instruction, scope)), 1
        return None

    def _steps(self, instruction: Instruction, computation: Computation) -> tuple[Transfer | None, str, bool]:
        """(what an instruction starts, its key, whether it waits for what has the key)."""
        opcode = instruction.opcode
        if opcode.removesuffix('-start') in KINDS:
            transfer = self._transfer(instruction, computation)
            return transfer, instruction.name, not opcode.endswith('-start')
        if opcode.removesuffix('-done') in (*KINDS, 'async', 'call'):
            return None, instruction.operands[0], True
        called = instruction.called
        # A call that is started runs on another core of the chip.
        if opcode not in ('fusion', 'async-start', 'call-start') or not called:
            return None, '', False
        fused = self.module.computations[called.get('calls') or called['to_apply']]
        found = next((part for part in fused.values() if part.opcode in KINDS), None)
        chain = found.attribute(r'chain_id="?([\w.\-]+)') if found else None
        is_last = any(_LAST in part.attributes for part in fused.values())
        if chain:
            is_first = any(_FIRST in part.attributes for part in fused.values())
            return self._transfer(found, fused) if is_first else None, f'chain {chain}', is_last
        # A collective with what it is made of or cut into, which the device waits for.
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
        # Slices have one axis between them, which only sums of gradients cross.
        across = {name: 1 for name, _ in self.mesh}
        return transfer_time(transfer, self.chip, efficiency_of(self.chip), across, self.island)

    def _compute_seconds(self, instruction: Instruction, computation: Computation) -> float:
        """The longer of its products and of what it writes to the device's memory; a kernel's products are unknown."""
        if instruction.opcode in _FREE or instruction.opcode.endswith(('-start', '-done', '-update')):
            return 0.0
        flops = 0.0
        if instruction.opcode == 'fusion' and instruction.called:
            flops = self.flops_of(instruction.called['calls'])
        elif instruction.opcode in ('dot', 'convolution'):
            flops = product_flops(instruction, _operands(instruction, computation))
        # What it writes into may be much larger than what it writes.
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
    """Of its results that are not in a memory on the chip."""
    laid_out = _LAID_OUT.findall(instruction.type)
    return sum(
        array.bytes for array, text in zip(instruction.arrays, laid_out, strict=True) if not _ON_CHIP.search(text)
    )
