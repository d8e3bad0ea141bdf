"""Request scheduler with continuous batching: requests join and leave at any time, and a forward pass serves all.

Each sample has a cache slot for the keys and values of its tokens. Slots keep their content after a sample ends. A
prompt that shares a prefix with any slot reuses that prefix, and only the rest is prefilled. The host reads tokens one
call late, while the next call runs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial

import jax

from maxlm.inference.cast_params import cast_params
from maxlm.inference.detokenizer import TextStream
from maxlm.inference.engine.compiled import CompiledFunctions
from maxlm.inference.engine.compiled_grammar import CompiledGrammar, wait_for_masks
from maxlm.inference.engine.decode_burst import DecodeBurst, DecodeCall
from maxlm.inference.engine.grammar import Grammars
from maxlm.inference.engine.model_runner import DecodeCounts
from maxlm.inference.engine.requests import Completion, Delta, EngineState, FinishReason, QueueFullError, Request
from maxlm.inference.engine.sequence import ActiveSequence, FinishedRequests, PendingCall, RequestHandle
from maxlm.inference.engine.slots import CacheLength, Slot, check_settings, choose_slot
from maxlm.inference.load import LoadedModel


class Engine:
    """Generates continuations of many prompts with one model. `submit` is thread-safe; `step` is for one thread.

    A sample depends only on its request, up to rounding (with model.matmul_precision=fp8, rows share scales). With
    model.rope_scaling=dynamic, cached keys are not rotated again, so tokens beyond the original context differ.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_slots: int = 8,
        max_context: int = 0,
        cache: str = 'model',
        max_queue_size: int = 0,
        chunk: int = 512,
        num_draft_tokens: int = 0,
        draft: LoadedModel | None = None,
    ):
        """Initializes the engine.

        Args:
            model: model to run.
            num_slots: number of concurrent samples, rounded up to a multiple of the row shards.
            max_context: maximum number of tokens of prompt and continuation; 0 = the context of the model.
            cache: store keys and values in the compute dtype (`model`) or in 8 bits (`int8`).
            max_queue_size: maximum number of samples that wait for a slot; 0 = unlimited.
            chunk: maximum number of prompt tokens prefilled between two tokens of running samples.
            num_draft_tokens: number of tokens drafted per pass; 0 = none, or 4 with `draft`.
            draft: model of `load_draft` that drafts these tokens; None = drafts from the preceding text.

        Raises:
            InputError: an argument is out of range, or the mesh does not support a cache.
        """
        context = model.config.model.max_positions
        check_settings(context, max_context=max_context, cache=cache, max_queue_size=max_queue_size)
        self.max_context = max_context or context
        self._num_ids = min(model.tokenizer.vocab_size, model.config.model.vocab_size)
        self._compiled = CompiledFunctions(
            model.config,
            model.layout,
            num_ids=self._num_ids,
            num_slots=num_slots,
            max_context=self.max_context,
            int8=cache == 'int8',
            chunk=chunk,
            num_draft_tokens=num_draft_tokens,
            draft=None if draft is None else draft.config,
        )
        models = [model] if draft is None else [model, draft]
        self._params = self._compiled.prepare(*(cast_params(each.params, each.config, each.layout) for each in models))
        self._tokenizer, self._stop_token_ids = model.tokenizer, frozenset(model.stop_token_ids)
        self._grammars = Grammars(model.tokenizer, self._stop_token_ids)
        rings = self._compiled.ring_slots().items()
        # Positions after a shared prefix that can be written before a ring buffer overwrites positions it still needs.
        self._ring_slack = min((slots - window for window, slots in rings), default=math.inf)
        self._slots = [Slot(number) for number in range(self._compiled.num_slots)]
        self._state = self._compiled.init_state()
        self._waiting: collections.deque[ActiveSequence] = collections.deque()
        # Samples in slots, and those of them whose prompt is not completely prefilled.
        self._running: list[ActiveSequence] = []
        self._prefilling: list[ActiveSequence] = []
        self._pending: collections.deque[PendingCall] = collections.deque()
        self._burst = DecodeBurst(self._compiled.max_tokens, self._compiled.pass_tokens)
        self._cache_length = CacheLength(self._compiled.cache_lengths)
        self._condition = threading.Condition()
        self._max_queue_size, self._clock = max_queue_size, 0
        self._counts = collections.Counter(dict.fromkeys(EngineState._fields[3:], 0))

    @property
    def state(self) -> EngineState:
        """Queue lengths and counters."""
        with self._condition:
            return EngineState(len(self._slots), len(self._running), len(self._waiting), **self._counts)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values over all devices, including those of the draft model."""
        return self._compiled.cache_bytes()

    def warm_up(self, on_program: Callable[[str], None] | None = None) -> None:
        """Compiles every program that a request can need. `on_program` receives the name of each before it compiles."""
        for name, cache_length, call in self._compiled.warm_up_calls():
            if on_program is not None:
                on_program(name)
            self._resize(cache_length)
            self._state, sampled = call(self._params, self._state)
            jax.block_until_ready(sampled)
        self._resize(self._compiled.cache_lengths[0])

    def check(self, request: Request) -> None:
        """Raises InputError if a request does not fit, or contains ids unknown to the tokenizer or the model."""
        request.check(max_context=self.max_context, num_ids=self._num_ids)

    def prepare(self, request: Request, is_cancelled: Callable[[], bool] | None = None) -> Request:
        """Compiles the grammar of a request, if any, and returns the request with it. See `Grammars.compile`."""
        if not isinstance(request.grammar, str) or not request.grammar:
            return request
        return dataclasses.replace(request, grammar=self._grammars.compile(request.grammar, is_cancelled))

    def submit(self, request: Request, listener: Callable[[Delta], None]) -> RequestHandle:
        """Queues a request. `step` calls `listener` until each sample has a delta with a finish reason.

        Raises:
            InputError: `check` rejects the request.
            QueueFullError: too many samples are waiting.
        """
        self.check(request)
        grammar = self.prepare(request).grammar
        samples = [
            ActiveSequence(
                request,
                number,
                listener,
                TextStream(self._tokenizer, request.prompt, request.stops),
                grammar.start() if isinstance(grammar, CompiledGrammar) else None,
            )
            for number in range(request.num_samples)
        ]
        with self._condition:
            free = len(self._slots) - len(self._running)
            if self._max_queue_size and len(self._waiting) + len(samples) > self._max_queue_size + free:
                raise QueueFullError(f'the queue is full: {len(self._waiting)} samples are waiting')
            self._waiting.extend(samples)
            self._condition.notify_all()
        return RequestHandle(samples, self.wake)

    def wake(self) -> None:
        """Interrupts `wait`."""
        with self._condition:
            self._condition.notify_all()

    def wait(self, timeout: float) -> None:
        """Waits for work, at most `timeout` seconds."""
        with self._condition:
            if not self._has_work:
                self._condition.wait(timeout)

    def step(self) -> bool:
        """Ends cancelled sequences, fills free slots, dispatches decoding, and reads earlier results.

        Returns False if no work is left.
        """
        self._drop_cancelled()
        num_pending = len(self._pending)
        self._prefill()
        if any(sample.matcher is not None for pending in self._pending for _, sample, _ in pending.samples):
            # A grammar needs the last token before it can restrict the next one.
            while self._pending:
                self._process_output(self._pending.popleft())
            num_pending = 0
        self._receive_masks()
        self._decode()
        # Results of earlier calls; those of this step are read after the next dispatch.
        for _ in range(num_pending):
            self._process_output(self._pending.popleft())
        return self._has_work

    def fail(self) -> None:
        """Ends all samples as failed, after an exception in `step`."""
        with self._condition:
            samples = [*self._running, *self._waiting]
            self._waiting.clear()
        for sample in samples:
            self._finish(sample, 'failed')
        self._pending.clear()

    def complete(
        self, requests: Sequence[Request], on_done: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Completes requests and returns all samples, [request][sample]. Requires exclusive use of the engine.

        Args:
            requests: requests to complete.
            on_done: called with the index of each completed request.

        Raises:
            InputError: a request does not fit. Nothing is generated in this case.
        """
        for request in requests:
            self.check(request)
            self.prepare(request)
        finished = FinishedRequests([request.num_samples for request in requests], on_done)
        for number, request in enumerate(requests):
            # A grammar is in use from now on, and their number is limited.
            while request.grammar and len(self._waiting) >= len(self._slots):
                self.step()
            self.submit(request, partial(finished.add, number))
        while self.step():
            pass
        return finished.completions()

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._running or self._pending)

    def _drop_cancelled(self) -> None:
        with self._condition:
            cancelled = [sample for sample in (*self._running, *self._waiting) if sample.is_cancelled]
            if cancelled:
                self._waiting = collections.deque(sample for sample in self._waiting if not sample.is_cancelled)
        for sample in cancelled:
            self._finish(sample, 'cancelled')

    def _prefill(self) -> None:
        """Prefills at most the tokens of one chunk, because running samples wait for them."""
        budget = self._compiled.chunk
        while budget > 0:
            samples = self._prefilling[: self._compiled.num_row_shards]
            while len(samples) < self._compiled.num_row_shards and (sample := self._pop_waiting()) is not None:
                self._assign_slot(sample)
                samples.append(sample)
            if not samples:
                return
            self._resize(self._cache_length.fit(max(len(sample.request.prompt) for sample in samples)))
            chunks = [sample.next_chunk(self._compiled.chunk_length(sample.num_unfilled)) for sample in samples]
            budget -= max(len(chunk.tokens) for chunk in chunks)
            if budget < 0:
                return
            with_top = any(sample.request.top_log_probs for sample in samples)
            self._state, sampled, sums_PD, hidden_PTD = self._compiled.prefill(
                self._params, self._state, chunks, with_top=with_top
            )
            if any(sample.request.score_prompt for sample in samples):
                scores = self._compiled.score(self._params, hidden_PTD, chunks, with_top=with_top)
                for row, sample in enumerate(samples):
                    sample.add_scores(scores, row, len(chunks[row].tokens))
            finished: list[tuple[int, ActiveSequence, int]] = []
            for row, (sample, chunk) in enumerate(zip(samples, chunks, strict=True)):
                slot = self._slots[chunk.slot]
                end = chunk.start + len(chunk.tokens)
                sample.add_hidden_sum(sums_PD, row)
                slot.content = list(sample.request.prompt[:end])
                slot.num_written = max(slot.num_written, end)
                if end == len(sample.request.prompt):
                    self._prefilling.remove(sample)
                    sample.num_dispatched = 1
                    finished.append((row, sample, 1))
            self._pending.append(PendingCall(sampled, finished, self._burst.now(), 0, None))

    def _pop_waiting(self) -> ActiveSequence | None:
        with self._condition:
            if not self._waiting or all(slot.sample is not None for slot in self._slots):
                return None
            self._running.append(self._waiting.popleft())
            return self._running[-1]

    def _assign_slot(self, sample: ActiveSequence) -> None:
        reusable, counts, salt = sample.reusable_tokens, self._compiled.row_counts, sample.request.cache_salt
        slot, source, shared = choose_slot(self._slots, reusable, slack=self._ring_slack, row_counts=counts, salt=salt)
        self._clock += 1
        slot.sample, slot.last_used, slot.salt = sample, self._clock, salt
        if source is not slot:
            self._state = self._compiled.copy_slot(self._state, source.number, slot.number)
            # The source may have been written beyond the shared prefix.
            slot.num_written = source.num_written
        elif not shared:
            slot.num_written = 0
        slot.content = source.content[:shared]
        sample.slot = slot
        self._prefilling.append(sample)
        self._counts['prompt_tokens'] += len(sample.request.prompt)
        self._counts['cached_tokens'] += shared

    def _receive_masks(self) -> None:
        """Receives token masks, and ends the samples that their grammar ends.

        Samples without a mask sit out the next call.
        """
        samples = [sample for sample in self._running if sample.num_generated]
        delay = self._burst.mask_delay if self._active() or self._has_prefill else None
        wait_for_masks([sample.matcher for sample in samples if sample.matcher is not None], delay)
        for sample in samples:
            if (delta := sample.settle(self._stop_token_ids)) is not None:
                self._deliver(sample, delta)
            if sample.finish_reason is None and (end := sample.grammar_end()) is not None:
                self._finish(sample, *end)

    def _active(self) -> list[tuple[int, ActiveSequence]]:
        """Returns the slots and samples that are prefilled, need more tokens, and have a mask if they need one."""
        return [(slot.number, each) for slot in self._slots if (each := slot.sample) is not None and each.can_decode]

    def _decode(self) -> None:
        """Dispatches a decoding call for every sequence that can take part in it."""
        if not (active := self._jump(self._active())):
            return
        remaining = [sample.request.max_tokens - sample.num_dispatched for _, sample in active]
        tokens = self._burst.num_tokens(remaining, has_prefill=self._has_prefill)
        if any(sample.matcher is not None for _, sample in active):
            tokens = self._burst.num_grammar_tokens([min(sample.max_call_tokens, tokens) for _, sample in active])
        if rewound := [sample.rewind() for _, sample in active if sample.is_rewound]:
            self._state = self._compiled.rewind(self._state, rewound)
        call = DecodeCall.of(active, tokens, self._compiled.num_rows(max(number for number, _ in active)))
        self._fit(call.max_length, tokens)
        rows, seeds = self._compiled.sampling_rows(call.settings)
        mask = self._compiled.token_mask(call.masks, call.forced)
        self._state, sampled, counts = self._compiled.decode(
            self._params, self._state, call.num_tokens, rows, seeds, mask, with_top=call.with_top
        )
        self._pending.append(PendingCall(sampled, call.samples, self._burst.now(), tokens, counts))

    def _jump(self, active: list[tuple[int, ActiveSequence]]) -> list[tuple[int, ActiveSequence]]:
        """Dispatches a pass for each sample that jumps over tokens that its grammar forces. Returns the others."""
        others = []
        for number, sample in active:
            chunk = sample.jump(max_length=self._compiled.chunk, num_active=len(active))
            if chunk is None:
                others.append((number, sample))
                continue
            self._fit(sample.dispatch(len(chunk.tokens)))
            self._state, sampled, _, _ = self._compiled.prefill(self._params, self._state, [chunk], with_top=False)
            forced = chunk.tokens[1:]
            self._counts.update({'passes': 1, 'draft_tokens': len(forced), 'accepted_tokens': len(forced)})
            self._pending.append(PendingCall(sampled, [(0, sample, 1)], self._burst.now(), 0, None, forced))
        return others

    def _fit(self, length: int, passes: int = 0) -> None:
        """Resizes the cache for `length` positions and the prompts that are not completely prefilled."""
        prompts = [len(sample.request.prompt) for sample in self._prefilling]
        self._resize(self._cache_length.fit(max(length, *prompts, 1), passes))

    def _resize(self, cache_length: int) -> None:
        if cache_length != self._cache_length.size:
            self._state = self._compiled.resize(self._state, cache_length)
            self._cache_length.size = cache_length
            for slot in self._slots:
                del slot.content[cache_length:]

    @property
    def _has_prefill(self) -> bool:
        """True if the next step has a prefill chunk."""
        return bool(self._prefilling or (self._waiting and any(slot.sample is None for slot in self._slots)))

    def _process_output(self, pending: PendingCall) -> None:
        if not pending.samples:
            return
        with_top = any(sample.request.top_log_probs for _, sample, _ in pending.samples)
        arrays, counts = jax.device_get((pending.sampled if with_top else pending.sampled[:2], pending.counts))
        self._burst.record(pending.dispatched, pending.num_tokens)
        if counts is not None:
            self._counts.update(dict(zip(DecodeCounts._fields, counts.tolist(), strict=True)))
        for row, sample, num in pending.samples:
            if sample.finish_reason is not None:
                continue
            tokens = pending.tokens(sample.request, [x[:num, row] for x in arrays])
            self._deliver(sample, sample.receive(tokens, self._stop_token_ids))

    def _deliver(self, sample: ActiveSequence, delta: Delta) -> None:
        self._counts['generated_tokens'] += len(delta.tokens) + (delta.end_token is not None)
        if delta.finish_reason is not None:
            self._release(sample, delta.finish_reason)
        sample.listener(delta)

    def _finish(self, sample: ActiveSequence, finish: FinishReason, error: str = '') -> None:
        self._release(sample, finish)
        sample.listener(Delta(sample.number, sample.text.finish(), (), finish, error=error))

    def _release(self, sample: ActiveSequence, finish: FinishReason) -> None:
        sample.finish_reason = finish
        if sample.matcher is not None:
            sample.matcher.close()
        if sample in self._prefilling:
            self._prefilling.remove(sample)
        if sample.slot is not None:
            sample.slot.sample = None
        with self._condition:
            if sample in self._running:
                self._running.remove(sample)
