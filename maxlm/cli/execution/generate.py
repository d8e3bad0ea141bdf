"""Generates text from prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from maxlm.cli.execution.chat import sampling_of, standard_terminal
from maxlm.errors import InputError, name_errors, os_message
from maxlm.inference.drafting.load_draft import load_draft
from maxlm.inference.engine.batch_io import Line, read_lines, write_completions
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.interactive import ChatSession, continue_lines, stream
from maxlm.inference.engine.requests import Completion, Request
from maxlm.inference.load import LoadedModel, load_model
from maxlm.inference.prompts import chat_prompt, infill_prompt, text_prompt
from maxlm.log import Console, progress_bar
from maxlm.storage.regular_files import read_text


def execute(options: argparse.Namespace) -> None:
    """Prints each prompt with its completions or answers, or writes them to a file."""
    texts = [*(options.prompt or []), *(_read(path) for path in options.prompt_file or [])]
    sampling = sampling_of(options)

    with Console(stderr=True):
        model = load_model(options.checkpoint, num_devices=1, quantize=options.quantize)

    def request(ids: list[int]) -> Request:
        return Request(
            tuple(ids),
            options.max_tokens,
            sampling,
            seed=options.seed,
            num_samples=options.num_samples,
            stops=tuple(options.stop or ()),
        )

    if options.interactive:
        engine, model = _with_engine(model, options, 1)
        if options.chat:
            ChatSession(model, engine, request, standard_terminal(), max_tokens=options.max_tokens).run()
        else:
            continue_lines(engine, lambda text: request(_prompt(model, text, options)), standard_terminal())
        return
    if options.input:
        lines = read_lines(options.input, model, parse_special=options.parse_special)
        if not lines:
            raise InputError(f'{options.input}: the file contains no prompts; add lines with "prompt" or "messages"')
        engine, model = _with_engine(model, options, len(lines) * options.num_samples)
        _complete_lines(engine, lines, options.output, request)
        return
    requests = [request(_prompt(model, text, options)) for text in texts]
    shown = [text + ('\n\n' if options.chat else '') for text in texts]
    engine, model = _with_engine(model, options, len(requests) * options.num_samples)
    if len(requests) == options.num_samples == 1:
        engine.check(requests[0])
        print(shown[0], end='', flush=True)
        stream(engine, requests[0], sys.stdout)
        return
    rows = _complete(engine, requests)
    number, total = 0, len(requests) * options.num_samples
    for text, samples in zip(shown, rows, strict=True):
        for sample in samples:
            number += 1
            print(f'--- {number} of {total}')
            print(text + sample.text + (options.suffix or ''))


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise InputError(f'--prompt-file={path}: {os_message(error)}; give a readable file') from error
    except UnicodeDecodeError as error:
        raise InputError(f'--prompt-file={path}: byte {error.start} is not UTF-8; save the file as UTF-8') from error


def _prompt(model: LoadedModel, text: str, options: argparse.Namespace) -> list[int]:
    if options.suffix is not None:
        with name_errors('--suffix'):
            return infill_prompt(model.tokenizer, text, options.suffix)
    if not options.chat:
        return text_prompt(model.tokenizer, text, parse_special=options.parse_special)
    with name_errors('--chat'):
        return chat_prompt(model, [{'role': 'user', 'content': text}])


def _with_engine(model: LoadedModel, options: argparse.Namespace, samples: int) -> tuple[Engine, LoadedModel]:
    """Returns an engine for `samples` samples, and the model without the parameters that the engine owns."""
    with Console(stderr=True):
        engine = Engine(
            model,
            num_slots=min(options.slots, samples),
            cache=options.kv_cache_dtype,
            num_draft_tokens=options.num_draft_tokens,
            draft=load_draft(options.draft_model, model),
        )
    return engine, model.without_params()


def _complete_lines(
    engine: Engine, lines: Sequence[Line], output: Path, request: Callable[[list[int]], Request]
) -> None:
    requests = []
    for line in lines:
        with name_errors(line.name):
            requests.append(request(line.ids))
            engine.check(requests[-1])

    write_completions(output, lines, lambda: _complete(engine, requests))


def _complete(engine: Engine, requests: Sequence[Request]) -> list[list[Completion]]:
    with progress_bar('generate', total=len(requests), unit='prompt', show=True) as bar:
        return engine.complete(requests, on_done=lambda _: bar.update())
