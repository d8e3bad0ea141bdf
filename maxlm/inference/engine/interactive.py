"""Interactive generation in a terminal or a pipe."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TextIO

from maxlm.errors import InputError, surrogate_in
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Delta, Request
from maxlm.inference.fit_conversation import answer_length, fit_conversation
from maxlm.inference.load import LoadedModel
from maxlm.inference.prompts import chat_prompt

NEW, SYSTEM, QUIT = '/new', '/system', '/quit'
HELP = f'{QUIT} or Ctrl-D exits, Ctrl-C stops a response'
CHAT_HELP = f'{NEW} starts a new conversation, {SYSTEM} TEXT sets its system prompt, {HELP}'
INPUT_PROMPT = '> '
_COMMAND = re.compile(r'/[a-z]+')


class Terminal(NamedTuple):
    """Input and output of an interactive session.

    Attributes:
        read_line: reads a line after showing a prompt, like `input`. EOFError ends the session.
        output: receives the responses.
        notes: receives help, errors and notes about the conversation.
        is_interactive: a person types the lines. Otherwise there are no prompts and no help, and an error ends the
            session.
    """

    read_line: Callable[[str], str]
    output: TextIO
    notes: TextIO
    is_interactive: bool

    def lines(self) -> Iterator[str]:
        """Yields the lines that are not empty, until the end of the input.

        Raises:
            InputError: the input is not UTF-8.
        """
        while True:
            try:
                line = self.read_line(INPUT_PROMPT if self.is_interactive else '')
            except (EOFError, KeyboardInterrupt) as end:
                if self.is_interactive:
                    self.note('')
                if self.is_interactive and isinstance(end, KeyboardInterrupt):
                    continue
                return
            except UnicodeDecodeError as error:
                raise InputError(f'standard input: byte {error.start} is not UTF-8; use UTF-8 text') from error
            if (place := surrogate_in(line)) >= 0:
                byte = len(os.fsencode(line[:place]))
                raise InputError(f'standard input: byte {byte} of a line is not UTF-8; use UTF-8 text')
            if line.strip():
                yield line

    def note(self, text: str) -> None:
        """Writes a line that is not part of a response."""
        self.notes.write(f'{text}\n')
        self.notes.flush()


def stream(engine: Engine, request: Request, output: TextIO) -> str:
    """Writes and returns the text of a request with one sample as it is generated. Ctrl-C cancels the request."""
    texts: list[str] = []

    def on_delta(delta: Delta) -> None:
        texts.append(delta.text)
        output.write(delta.text)
        output.flush()

    with _cancel_on_interrupt(engine.submit(request, on_delta).cancel):
        while engine.step():
            pass
    output.write('\n')
    output.flush()
    return ''.join(texts)


@contextlib.contextmanager
def _cancel_on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """Makes the first Ctrl-C call `cancel`. An exception within a step would leave the engine in an undefined state."""

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        # The next Ctrl-C ends the program, for example during a long compilation.
        signal.signal(signal.SIGINT, former)
        cancel()

    former = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def continue_lines(engine: Engine, request: Callable[[str], Request], terminal: Terminal) -> None:
    """Reads lines until the end of the input, and continues each as a separate text.

    Args:
        engine: engine of the model, used exclusively.
        request: builds a request from a text.
        terminal: input and output.

    Raises:
        InputError: a line is too long, and the session is not interactive.
    """
    if terminal.is_interactive:
        terminal.note(HELP)
    for line in terminal.lines():
        if line.strip() == QUIT:
            return
        with _reported_errors(terminal):
            stream(engine, request(line), terminal.output)


@contextlib.contextmanager
def _reported_errors(terminal: Terminal) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if not terminal.is_interactive:
            raise
        terminal.note(str(error))


class ChatSession:
    """A conversation in a terminal. If it does not fit the context, the oldest turns are dropped."""

    def __init__(
        self,
        model: LoadedModel,
        engine: Engine,
        request: Callable[[list[int]], Request],
        terminal: Terminal,
        *,
        system: str = '',
        max_tokens: int | None = None,
    ):
        """Initializes an empty conversation.

        Args:
            model: model whose chat template is used.
            engine: engine of the model, used exclusively.
            request: builds a request from the token ids of a prompt.
            terminal: input and output.
            system: system prompt; '' = none.
            max_tokens: maximum number of tokens of a response; None = the rest of the context.

        Raises:
            InputError: the model has no chat template, or the template has no system prompt.
        """
        self._model, self._engine, self._request, self._terminal = model, engine, request, terminal
        self._room = answer_length(engine.max_context, max_tokens)
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._num_dropped = 0
        # Reports a model that cannot chat before the first line is read.
        chat_prompt(model, self._with_system([{'role': 'user', 'content': 'Hello'}]))

    def run(self) -> None:
        """Reads lines until the end of the input, and responds to each.

        Raises:
            InputError: a line cannot be answered, and the session is not interactive.
        """
        if self._terminal.is_interactive:
            self._terminal.note(CHAT_HELP)
        for line in self._terminal.lines():
            if line.strip() == QUIT:
                return
            with _reported_errors(self._terminal):
                if not self._command(line.strip()):
                    self._respond(line)

    def _command(self, line: str) -> bool:
        """Carries out a command. Returns False if the line is a message."""
        name, _, argument = line.partition(' ')
        if name == SYSTEM:
            self._system = argument.strip()
        elif line == NEW:
            self._messages.clear()
            self._num_dropped = 0
        elif _COMMAND.fullmatch(line):
            raise InputError(f'unknown command {line}; use {NEW}, {SYSTEM} or {QUIT}')
        else:
            return False
        return True

    def _respond(self, text: str) -> None:
        conversation = [*self._messages, {'role': 'user', 'content': text}]
        fitted = fit_conversation(self._with_system(conversation), self._fits)
        request = self._request(chat_prompt(self._model, fitted.messages))
        self._engine.check(request)
        if fitted.num_dropped > self._num_dropped:
            context = self._engine.max_context
            self._terminal.note(
                f'(The context of {context} tokens is full. The model no longer sees the oldest {fitted.num_dropped} '
                f'messages.)'
            )
        self._num_dropped = fitted.num_dropped
        response = stream(self._engine, request, self._terminal.output)
        # A message whose response was stopped at once is forgotten, since templates may require alternating roles.
        if response:
            self._messages = [*conversation, {'role': 'assistant', 'content': response}]

    def _fits(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        return len(chat_prompt(self._model, messages)) + self._room <= self._engine.max_context

    def _with_system(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        return [*([{'role': 'system', 'content': self._system}] if self._system else []), *messages]
