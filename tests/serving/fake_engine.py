"""Provides an engine without a model: it emits given text, one byte per step, and fails or blocks on demand."""

import collections
import itertools
import threading
import time

import numpy as np

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.inference.engine.requests import Delta, EngineState, GeneratedToken, PromptScores, QueueFullError
from maxlm.serving.request_parsing import ModelDetails, ServedModel

DETAILS = ModelDetails(num_parameters=1234, dim=3, dtype='float32', weight_quantization='float', kv_cache_dtype='model')
REPLY = 'The quick brown fox jumps over the lazy dog, and “über” is one word. '


class FakeTicket:
    def __init__(self):
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True


class _Sample:
    def __init__(self, request, number, listener, ticket, reply):
        self.request, self.number, self.listener, self.ticket = request, number, listener, ticket
        shift = (request.seed + number) % len(reply) if request.sampling.temperature else 0
        self.bytes = itertools.cycle((reply[shift:] + reply[:shift]).encode())
        self.drawn = bytearray()
        self.shown = 0

    def step(self):
        """Returns the next delta."""
        if self.request.embed:
            return Delta(self.number, '', (), 'stop', embedding_of(self.request.prompt))
        scores = scores_of(self.request) if self.request.score_prompt and not self.drawn else None
        if not self.request.max_tokens:
            return Delta(self.number, '', (), 'length', prompt_scores=scores)
        token = next(self.bytes)
        self.drawn.append(token)
        text = self.drawn.decode(errors='ignore')
        finish = 'length' if len(self.drawn) == self.request.max_tokens else None
        for stop in self.request.stops:
            if stop in text:
                text, finish = text.partition(stop)[0], 'stop'
        # The possible start of a stop string is held back.
        longest = max(map(len, self.request.stops), default=1) - 1
        until = len(text) if finish else max(self.shown, len(text) - longest)
        new, self.shown = text[self.shown : until], until
        top = self.request.top_log_probs
        others = tuple(((token + i) % 256, -0.5 - i) for i in range(top or 0))
        drawn = GeneratedToken(token, float('nan') if top is None else -0.5, others)
        return Delta(self.number, new, (drawn,), finish, prompt_scores=scores)


class FakeEngine:
    """Fake with the interface of `maxlm.inference.engine.engine.Engine`."""

    def __init__(self, *, num_slots=8, max_context=512, max_queue_size=64, reply=REPLY, seconds=0.0):
        self.max_context, self.num_slots, self.max_queue_size = max_context, num_slots, max_queue_size
        self.reply, self.seconds = reply, seconds
        # Steps produce tokens while `open` is set. The next step raises `broken`.
        self.open = threading.Event()
        self.open.set()
        self.broken = None
        # The latest request.
        self.last_request = None
        self._new = threading.Condition()
        self._waiting, self._running = collections.deque(), []
        self._prompt_tokens = self._drawn_tokens = self._runner = 0

    def check(self, request):
        if len(request.prompt) + request.max_tokens > self.max_context:
            raise InputError(f'max_tokens={request.max_tokens}: does not fit')

    def prepare(self, request, is_cancelled=None):
        return request

    def submit(self, request, listener):
        self.check(request)
        self.last_request = request
        with self._new:
            if len(self._waiting) + request.num_samples > self.max_queue_size > 0:
                raise QueueFullError
            ticket = FakeTicket()
            samples = (_Sample(request, i, listener, ticket, self.reply) for i in range(request.num_samples))
            self._waiting.extend(samples)
            self._prompt_tokens += len(request.prompt)
            self._new.notify()
        return ticket

    def step(self):
        if self.broken:
            raise self.broken
        with self._new:
            gone = [sample for sample in (*self._running, *self._waiting) if sample.ticket.is_cancelled]
            self._running = [sample for sample in self._running if sample not in gone]
            self._waiting = collections.deque(sample for sample in self._waiting if sample not in gone)
            while self._waiting and len(self._running) < self.num_slots:
                self._running.append(self._waiting.popleft())
        for sample in gone:
            sample.listener(Delta(sample.number, '', (), 'cancelled'))
        if not self.open.is_set():
            return False
        for sample in list(self._running):
            delta = sample.step()
            self._drawn_tokens += 1
            sample.listener(delta)
            if delta.finish_reason:
                self._running.remove(sample)
        self._runner += bool(self._running)
        if self.seconds and self._running:
            time.sleep(self.seconds)
        return bool(self._running or self._waiting)

    def wait(self, timeout):
        with self._new:
            if not self._waiting or not self.open.is_set():
                self._new.wait(min(timeout, 0.01))

    def fail(self):
        for sample in (*self._running, *self._waiting):
            sample.listener(Delta(sample.number, '', (), 'failed'))
        self._running.clear()
        self._waiting.clear()

    @property
    def state(self):
        counts = (len(self._running), len(self._waiting), self._prompt_tokens, 0, self._drawn_tokens, self._runner)
        return EngineState(self.num_slots, *counts, draft_tokens=0, accepted_tokens=0)


def scores_of(request):
    """Returns scores of a prompt: -(i + 1) for token i + 1, which is the second most likely one."""
    tokens = np.array(request.prompt[1:], np.int32)
    log_probs = -1.0 - np.arange(len(tokens), dtype=np.float32)
    num = request.top_log_probs or 0
    ids = (tokens[:, None] - 1 + np.arange(num)[None, :]) % 256
    return PromptScores(log_probs, ids, log_probs[:, None] + 0.5 - 0.5 * np.arange(num, dtype=np.float32)[None, :])


def embedding_of(prompt):
    """Returns the embedding of a prompt before normalization."""
    return np.array([len(prompt), prompt[0], 1], np.float32)


def chat_tokenizer():
    """Returns a byte tokenizer with the special tokens of ChatML."""
    return bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>'])


def served_by(engine, *, chat=True, parse_special=False):
    """Returns a byte-level model that this engine serves."""
    tokenizer = chat_tokenizer() if chat else bytes_tokenizer()
    encoder = ChatEncoder(tokenizer, ChatTemplate(CHATML, name='test')) if chat else None
    return ServedModel('tiny', 7, tokenizer, encoder, engine, DETAILS, parse_special=parse_special)
