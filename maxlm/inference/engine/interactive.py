"""A model in a terminal: what is typed is continued or answered, line by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from maxlm.errors import InputError
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Delta, Request
from maxlm.inference.load import LoadedModel
from maxlm.inference.prompts import chat_prompt, text_prompt

NEW, LEAVE = '/new', '/quit'
HELP = f'{NEW} forgets what was said, {LEAVE} or the end of the input leaves, Ctrl-C stops an answer'
INVITATION = '> '


def stream(engine: Engine, request: Request, output: TextIO) -> str:
    """Writes the text of a request with one sample while it comes, and returns it; Ctrl-C ends it early."""
    texts: list[str] = []

    def show(delta: Delta) -> None:
        texts.append(delta.text)
        output.write(delta.text)
        output.flush()

    ticket = engine.submit(request, show)
    while True:
        try:
            if not engine.step():
                break
        except KeyboardInterrupt:
            ticket.cancel()
    output.write('\n')
    output.flush()
    return ''.join(texts)


def talk(
    model: LoadedModel,
    engine: Engine,
    request: Callable[[list[int]], Request],
    *,
    chat: bool,
    read: Callable[[str], str],
    output: TextIO,
) -> None:
    """Reads lines until there are none, and answers each; with `chat` knowing what was said before.

    Args:
        model: whose tokenizer and chat template are used.
        engine: of the model; nobody else uses it.
        request: what to ask for a prompt's ids.
        chat: lines are turns of a user; else each is a text of its own that is continued.
        read: as `input`: shows an invitation and returns a line; EOFError ends.
        output: gets the answers. A line that cannot be taken is told there, and changes nothing.
    """
    output.write(f'{HELP}\n')
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = read(INVITATION)
        except (EOFError, KeyboardInterrupt):
            output.write('\n')
            return
        if text.strip() == LEAVE:
            return
        if text.strip() == NEW:
            messages.clear()
            continue
        if not text.strip():
            continue
        asked = [*messages, {'role': 'user', 'content': text}]
        try:
            ids = chat_prompt(model, asked) if chat else text_prompt(model.tokenizer, text)
            answer = stream(engine, request(ids), output)
        except InputError as error:
            output.write(f'{error}\n')
            continue
        if chat:
            messages = [*asked, {'role': 'assistant', 'content': answer}]
