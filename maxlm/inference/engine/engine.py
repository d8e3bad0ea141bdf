"""Continuous batching: requests come and go, and every pass through the model serves all that are there.

A sample of a request has a slot, which holds the keys and values of its tokens. What a slot holds stays when its sample
ends: a prompt that begins in the same way as the content of any slot takes that over and only the rest goes through the
model. The host reads tokens one call late, while the next call is on its way.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from maxlm.errors import InputError
from maxlm.inference.cast_params import cast_params
from maxlm.inference.detokenizer import TextStream
from maxlm.inference.engine.compiled import MOST_PASSES, CompiledFunctions, PrefillChunk
from maxlm.inference.engine.decode_burst import DecodeBurst
from maxlm.inference.engine.model_runner import PendingPrompt, SampledTokens
from maxlm.inference.engine.requests import Completion, Delta, EngineState, Finish, QueueFullError, Request
from maxlm.inference.engine.sequence import ActiveSequence, FinishedRequest, RequestHandle, drawn_tokens
from maxlm.inference.engine.slots import FreeSlot, Slot, choose_slot
from maxlm.inference.load import LoadedModel
from maxlm.inference.sampling import Rows, Sampling, rows_of

CACHES = ('model', 'int8')
# Of slots that rest.
_NOTHING = Sampling(temperature=0)


class _Pending(NamedTuple):
    """A call whose tokens the host has not read."""

    drawn: SampledTokens
    # Whose they are, by row, and how many.
    samples: list[tuple[int, ActiveSequence, int]]
    asked: float
    # 0: of a prompt.
    passes: int


class Engine:
    """Continues prompts with one model, many at a time. `submit` may come from any thread, `step` from one.

    What a sample becomes depends on its request only, but for rounding (with model.matmul_precision=fp8 rows do share
    scales). With model.rope_scaling=dynamic keys stay as they were rotated when they came, so that beyond the original
    context tokens are not those of one pass over the whole text.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_slots: int = 8,
        max_context: int = 0,
        cache: str = 'model',
        max_waiting: int = 0,
        chunk: int = 512,
    ):
        """
        Args:
            model: what continues.
            num_slots: samples at a time; rounded up to the devices that rows are split over.
            max_context: tokens of prompt and continuation together, at most; 0 = what the model takes.
            cache: keys and values in the type of the computation (`model`) or in 8 bits (`int8`).
            max_waiting: samples that may wait for a slot; 0 = as many as come.
            chunk: tokens of prompts that go through the model between two tokens of running samples, at most.

        Raises:
            InputError: an argument is out of range, or the mesh allows no cache.
        """
        context = model.config.model.max_positions
        if not 0 <= max_context <= context:
            raise InputError(
                f'max_context={max_context}: must be from 1 to {context}, the context of the model; 0 = that'
            )
        if cache not in CACHES:
            raise InputError(f'cache={cache}: must be one of {", ".join(CACHES)}')
        for name, value, least in (('num_slots', num_slots, 1), ('max_waiting', max_waiting, 0), ('chunk', chunk, 1)):
            if value < least:
                raise InputError(f'{name}={value}: must be at least {least}')
        parts = model.layout.num_shards('batch')
        self.max_context = max_context or context
        self._programs = CompiledFunctions(
            model.config,
            model.layout,
            num_ids=model.tokenizer.vocab_size,
            num_slots=-(-num_slots // parts) * parts,
            max_context=self.max_context,
            int8=cache == 'int8',
            chunk=chunk,
        )
        self._params = self._programs.prepare(cast_params(model.params, model.config, model.layout))
        self._tokenizer, self._ends = model.tokenizer, frozenset(model.ends)
        self._num_ids = min(model.tokenizer.vocab_size, model.config.model.vocab_size)
        self._max_waiting = max_waiting
        rings = self._programs.ring_slots()
        # Positions before the continuation of a prompt that a ring may have written over: none where no layer has one.
        self._ring_room = min((slots - window for window, slots in rings.items()), default=math.inf)
        self._slots = [Slot(number) for number in range(self._programs.num_slots)]
        self._state = self._programs.start()
        self._waiting: collections.deque[ActiveSequence] = collections.deque()
        # In slots; those among them whose prompt is not all there.
        self._running: list[ActiveSequence] = []
        self._filling: list[ActiveSequence] = []
        self._pending: collections.deque[_Pending] = collections.deque()
        self._pace = DecodeBurst(MOST_PASSES)
        self._room = FreeSlot(self._programs.rooms)
        self._settings: tuple[list[tuple[Sampling, int, int]], tuple[Rows, PendingPrompt]] | None = None
        self._changed = threading.Condition()
        self._clock = 0
        self._counts = collections.Counter[str]()

    @property
    def state(self) -> EngineState:
        """How much there is to do, and what was done."""
        with self._changed:
            return EngineState(
                num_slots=len(self._slots),
                running=len(self._running),
                waiting=len(self._waiting),
                prompt_tokens=self._counts['prompt'],
                shared_tokens=self._counts['shared'],
                drawn_tokens=self._counts['drawn'],
                passes=self._counts['passes'],
            )

    @property
    def cache_bytes(self) -> int:
        """Of keys and values, over all devices."""
        return self._programs.cache_bytes()

    def warm_up(self, tell: Callable[[str], None] | None = None) -> None:
        """Compiles every program that a request can need, so that none waits for one; `tell` gets their names."""
        for name, room, call in self._programs.shapes():
            if tell is not None:
                tell(name)
            self._resize(room)
            self._state, drawn = call(self._params, self._state)
            jax.block_until_ready(drawn)
        self._resize(self._programs.rooms[0])

    def check(self, request: Request) -> None:
        """Raises InputError when a request does not fit, or has ids that the model does not know."""
        longest, context = len(request.prompt), self.max_context
        if longest + request.max_tokens > context:
            raise InputError(
                f'max_tokens={request.max_tokens}: the prompt has {longest} tokens and the context of the model '
                f'{context}; at most {max(0, context - longest)} tokens can follow'
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._num_ids:
            raise InputError(f'the prompt has ids outside of 0 … {self._num_ids - 1}, those of the tokenizer')

    def submit(self, request: Request, listener: Callable[[Delta], None]) -> RequestHandle:
        """Has a request done. `listener` is called by `step`, until each sample had a delta with its finish.

        Raises:
            InputError: as `check`.
            QueueFullError: too many samples wait.
        """
        self.check(request)
        samples = [
            ActiveSequence(request, number, listener, TextStream(self._tokenizer, request.prompt, request.stops))
            for number in range(request.num_samples)
        ]
        with self._changed:
            free = len(self._slots) - len(self._running)
            if self._max_waiting and len(self._waiting) + len(samples) > self._max_waiting + free:
                raise QueueFullError(f'{len(self._waiting)} samples wait already')
            self._waiting.extend(samples)
            self._changed.notify_all()
        return RequestHandle(samples, self.wake)

    def wake(self) -> None:
        """Ends a `wait`."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Until there is something to do, or so many seconds have passed."""
        with self._changed:
            if not self._busy:
                self._changed.wait(timeout)

    def step(self) -> bool:
        """Ends what was cancelled, fills free slots, has some tokens drawn for every slot, reads earlier ones.

        Returns False when there is nothing left to do.
        """
        self._drop_cancelled()
        before = len(self._pending)
        self._prefill()
        self._decode()
        # What was on its way before; what this step draws is read when the next one's is on its way.
        for _ in range(before):
            self._read(self._pending.popleft())
        return self._busy

    def fail(self) -> None:
        """Ends everything, as a step that raised leaves it."""
        with self._changed:
            samples = [*self._running, *self._waiting]
            self._waiting.clear()
        for sample in samples:
            self._end(sample, 'failed')
        self._pending.clear()

    def complete(
        self, requests: Sequence[Request], tell: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """All samples of all requests, [request][sample]; for who has the engine alone.

        Args:
            requests: what is asked.
            tell: is called with the number of each request that is done.

        Raises:
            InputError: one does not fit; nothing is drawn then.
        """
        collected = [[FinishedRequest() for _ in range(request.num_samples)] for request in requests]
        for request in requests:
            self.check(request)

        def listen(number: int) -> Callable[[Delta], None]:
            def listener(delta: Delta) -> None:
                collected[number][delta.sample].add(delta)
                if tell is not None and delta.finish and all(part.finish for part in collected[number]):
                    tell(number)

            return listener

        for number, request in enumerate(requests):
            self.submit(request, listen(number))
        while self.step():
            pass
        return [[part.completion() for part in parts] for parts in collected]

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._running or self._pending)

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = [sample for sample in (*self._running, *self._waiting) if sample.cancelled]
            if cancelled:
                self._waiting = collections.deque(sample for sample in self._waiting if not sample.cancelled)
        for sample in cancelled:
            self._end(sample, 'cancelled')

    def _prefill(self) -> None:
        """Prompts, a chunk of each at a time; no more in one step than what one long prompt has in a chunk."""
        budget = self._programs.chunk
        while budget > 0:
            samples = self._filling[: self._programs.rows]
            while len(samples) < self._programs.rows and (sample := self._next_waiting()) is not None:
                self._place(sample)
                samples.append(sample)
            if not samples:
                return
            self._resize(self._room.fit(max(len(sample.request.prompt) for sample in samples)))
            chunks = [self._chunk(sample) for sample in samples]
            want_top = any(sample.request.top_log_probs for sample in samples)
            self._state, drawn = self._programs.prefill(self._params, self._state, chunks, want_top=want_top)
            budget -= max(len(chunk.tokens) for chunk in chunks)
            complete: list[tuple[int, ActiveSequence, int]] = []
            for row, (sample, chunk) in enumerate(zip(samples, chunks, strict=True)):
                slot = self._slots[chunk.slot]
                end = chunk.start + len(chunk.tokens)
                slot.content = list(sample.request.prompt[:end])
                slot.written = max(slot.written, end)
                if end == len(sample.request.prompt):
                    self._filling.remove(sample)
                    sample.asked = 1
                    complete.append((row, sample, 1))
            self._pending.append(_Pending(drawn, complete, self._pace.now(), 0))

    def _next_waiting(self) -> ActiveSequence | None:
        with self._changed:
            if not self._waiting or all(slot.sample is not None for slot in self._slots):
                return None
            sample = self._waiting.popleft()
            self._running.append(sample)
            return sample

    def _place(self, sample: ActiveSequence) -> None:
        prompt = np.array(sample.request.prompt, np.int32)
        slot, source, shared = choose_slot(self._slots, prompt, room=self._ring_room, counts=self._programs.row_counts)
        self._clock += 1
        slot.sample, slot.used = sample, self._clock
        if source is not slot:
            self._state = self._programs.take_over(self._state, source.number, slot.number)
            # It may go further than what is shared.
            slot.written = source.written
        elif not shared:
            slot.written = 0
        slot.content = source.content[:shared]
        sample.slot = slot
        self._filling.append(sample)
        self._counts['prompt'] += len(prompt)
        self._counts['shared'] += shared

    def _chunk(self, sample: ActiveSequence) -> PrefillChunk:
        request, slot = sample.request, sample.slot
        assert slot is not None, 'a sample that is filled has a slot'
        start = len(slot.content)
        tokens = request.prompt[start : start + self._programs.chunk]
        return PrefillChunk(tokens, start, slot.number, request.prompt, request.sampling, request.seed, sample.number)

    def _decode(self) -> None:
        """Tokens for every sample whose prompt is there and that has not been asked for all its tokens."""
        active = [
            (slot.number, slot.sample)
            for slot in self._slots
            if slot.sample is not None and 0 < slot.sample.asked < slot.sample.request.max_tokens
        ]
        if not active:
            return
        wanted = [sample.request.max_tokens - sample.asked for _, sample in active]
        passes = self._pace.passes(wanted, is_next=self._has_next)
        num = self._programs.num_rows(max(number for number, _ in active))
        left = np.zeros(num, np.int32)
        settings = [(_NOTHING, 0, 0)] * num
        longest, want_top = max((len(sample.request.prompt) for sample in self._filling), default=1), False
        for number, sample in active:
            request = sample.request
            left[number] = min(passes, request.max_tokens - sample.asked)
            settings[number] = request.sampling, request.seed, sample.number
            sample.asked += int(left[number])
            length = len(request.prompt) + sample.asked - 1
            self._slots[number].written = max(self._slots[number].written, length)
            longest = max(longest, length)
            want_top |= bool(request.top_log_probs)
        self._resize(self._room.fit(longest, passes))
        rows, rest = self._rows(settings)
        self._state, drawn = self._programs.decode(self._params, self._state, left, rows, rest, want_top=want_top)
        self._counts['passes'] += passes
        samples = [(number, sample, int(left[number])) for number, sample in active]
        self._pending.append(_Pending(drawn, samples, self._pace.now(), passes))

    def _resize(self, room: int) -> None:
        if room != self._room.size:
            self._state = self._programs.resize(self._state, room)
            self._room.size = room
            for slot in self._slots:
                del slot.content[room:]

    @property
    def _has_next(self) -> bool:
        """Whether the next step has part of a prompt."""
        return bool(self._filling or (self._waiting and any(slot.sample is None for slot in self._slots)))

    def _rows(self, settings: list[tuple[Sampling, int, int]]) -> tuple[Rows, PendingPrompt]:
        """On the devices, and put there anew only when they change."""
        if self._settings is None or self._settings[0] != settings:
            samplings, seeds, numbers = zip(*settings, strict=True)
            rest = PendingPrompt(np.array(seeds, np.uint32), np.array(numbers, np.uint32))
            self._settings = settings, self._programs.put((rows_of(samplings), rest))
        return self._settings[1]

    def _read(self, pending: _Pending) -> None:
        if not pending.samples:
            return
        want_top = any(sample.request.top_log_probs for _, sample, _ in pending.samples)
        found = jax.device_get(pending.drawn if want_top else pending.drawn[:2])
        self._pace.came(pending.asked, pending.passes)
        for row, sample, num in pending.samples:
            if sample.finish is not None:
                continue
            before = sample.drawn
            delta = sample.take(drawn_tokens(sample.request, [x[:num, row] for x in found]), self._ends)
            self._counts['drawn'] += sample.drawn - before
            if delta.finish is not None:
                self._free(sample, delta.finish)
            sample.listener(delta)

    def _end(self, sample: ActiveSequence, finish: Finish) -> None:
        self._free(sample, finish)
        sample.listener(Delta(sample.number, sample.text.finish(), (), finish))

    def _free(self, sample: ActiveSequence, finish: Finish) -> None:
        sample.finish = finish
        if sample in self._filling:
            self._filling.remove(sample)
        if sample.slot is not None:
            sample.slot.sample = None
        with self._changed:
            if sample in self._running:
                self._running.remove(sample)
