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
HELP = f'{NEW} starts a new conversation, {QUIT} or Ctrl-D exits, Ctrl-C stops a response'
INPUT_PROMPT = '> '


def stream(engine: Engine, request: Request, output: TextIO) -> str:
    """Writes and returns the text of a request with one sample as it is generated. Ctrl-C cancels the request."""
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
    parse_special: bool = False,
    read_line: Callable[[str], str],
    output: TextIO,
) -> None:
    """Reads lines until end of input and responds to each. With `chat`, the conversation is kept.

    Args:
        model: model whose tokenizer and chat template are used.
        engine: engine of the model, used exclusively.
        request: builds a request from the token ids of a prompt.
        chat: treat lines as user turns; otherwise each line is a separate text to continue.
        parse_special: without `chat`, names of special tokens become their ids.
        read_line: reads a line after showing a prompt, like `input`. EOFError ends the session.
        output: receives the responses and error messages. A line with an error is ignored.
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
            if chat:
                ids = chat_prompt(model, conversation)
            else:
                ids = text_prompt(model.tokenizer, text, parse_special=parse_special)
            response = stream(engine, request(ids), output)
        except InputError as error:
            output.write(f'{error}\n')
            continue
        if chat:
            messages = [*conversation, {'role': 'assistant', 'content': response}]
