"""Interactive generation in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from maxlm.errors import InputError
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Delta, Request
from maxlm.inference.load import LoadedModel
from maxlm.inference.prompts import chat_prompt, text_prompt

NEW, QUIT = '/new', '/quit'
HELP = f'{NEW} forgets what was said, {QUIT} or the end of the input leaves, Ctrl-C stops an answer'
INPUT_PROMPT = '> '


def stream(engine: Engine, request: Request, output: TextIO) -> str:
    """Writes the text of a request with one sample while it comes, and returns it; Ctrl-C ends it early."""
    texts: list[str] = []

    def on_delta(delta: Delta) -> None:
        texts.append(delta.text)
        output.write(delta.text)
        output.flush()

    handle = engine.submit(request, on_delta)
    while True:
        try:
            if not engine.step():
                break
        except KeyboardInterrupt:
            handle.cancel()
    output.write('\n')
    output.flush()
    return ''.join(texts)


def run_interactive(
    model: LoadedModel,
    engine: Engine,
    request: Callable[[list[int]], Request],
    *,
    chat: bool,
    read_line: Callable[[str], str],
    output: TextIO,
) -> None:
    """Reads lines until end of input and responds to each; with `chat` the conversation is kept.

    Args:
        model: whose tokenizer and chat template are used.
        engine: of the model, used exclusively.
        request: what to ask for a prompt's ids.
        chat: lines are turns of a user; else each is a text of its own that is continued.
        read_line: as `input`: shows a prompt and returns a line; EOFError ends.
        output: gets the responses. Errors of a line are written there, and the line is ignored.
    """
    output.write(f'{HELP}\n')
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = read_line(INPUT_PROMPT)
        except (EOFError, KeyboardInterrupt):
            output.write('\n')
            return
        if text.strip() == QUIT:
            return
        if text.strip() == NEW:
            messages.clear()
            continue
        if not text.strip():
            continue
        conversation = [*messages, {'role': 'user', 'content': text}]
        try:
            ids = chat_prompt(model, conversation) if chat else text_prompt(model.tokenizer, text)
            response = stream(engine, request(ids), output)
        except InputError as error:
            output.write(f'{error}\n')
            continue
        if chat:
            messages = [*conversation, {'role': 'assistant', 'content': response}]
