"""Reads prompts from a JSONL file and writes their completions to another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.data.documents.null_fields import present_fields
from maxlm.data.documents.tools import tools_of
from maxlm.data.formats.jsonl import read_objects
from maxlm.errors import InputError, os_message
from maxlm.inference.engine.requests import Completion
from maxlm.inference.load import LoadedModel
from maxlm.inference.prompts import chat_prompt, infill_prompt, text_prompt
from maxlm.storage.atomic import new_file

# Fields of an input line, which has either a prompt or messages. A suffix requires a prompt.
PROMPT, MESSAGES, SUFFIX = 'prompt', 'messages', 'suffix'
# Field added to each output line.
COMPLETIONS = 'completions'


class Line(NamedTuple):
    """A parsed input line.

    Attributes:
        name: file and line number.
        fields: the JSON object.
        ids: token ids of the prompt.
    """

    name: str
    fields: dict[str, Any]
    ids: list[int]


def read_lines(path: Path, model: LoadedModel, *, parse_special: bool = False) -> list[Line]:
    """Reads a JSONL file and encodes the prompt of each line.

    A line is `{"prompt": TEXT}`, `{"prompt": TEXT, "suffix": TEXT}` for fill-in-the-middle, or `{"messages": [...]}`,
    optionally with `tools`. Other fields are copied to the output. With `parse_special`, names of special tokens in
    prompts without a suffix become their ids.

    Raises:
        InputError: the file cannot be read, or a line has another form. The message names the line.
    """
    return [
        _parse_line(f'{path}:{number}', fields, model, parse_special=parse_special)
        for number, fields in read_objects(str(path))
    ]


def _parse_line(name: str, fields: dict[str, Any], model: LoadedModel, *, parse_special: bool) -> Line:
    present = present_fields(fields)
    if (PROMPT in present) == (MESSAGES in present):
        raise InputError(f'{name}: must be an object with either "{PROMPT}" or "{MESSAGES}"')
    if COMPLETIONS in fields:
        raise InputError(f'{name}: already has "{COMPLETIONS}", the output field; rename or remove it')
    if MESSAGES in present and SUFFIX in present:
        raise InputError(f'{name}: "{SUFFIX}" requires "{PROMPT}"')
    if PROMPT in present and not all(isinstance(present.get(key, ''), str) for key in (PROMPT, SUFFIX)):
        raise InputError(f'{name}: "{PROMPT}" and "{SUFFIX}" must be strings')
    try:
        if MESSAGES in present:
            return Line(name, fields, chat_prompt(model, present[MESSAGES], tools=tools_of(present)))
        if SUFFIX in present:
            return Line(name, fields, infill_prompt(model.tokenizer, present[PROMPT], present[SUFFIX]))
        return Line(name, fields, text_prompt(model.tokenizer, present[PROMPT], parse_special=parse_special))
    except (InputError, ValueError) as error:
        raise InputError(f'{name}: {error}') from error


def write_completions(
    path: Path, lines: Sequence[Line], complete: Callable[[], Sequence[Sequence[Completion]]]
) -> None:
    """Writes the lines with `"completions": [{"text", "finish_reason"}, …]` atomically.

    Raises:
        InputError: the file already exists or cannot be written.
    """
    if path.exists():
        raise InputError(f'{path}: file already exists; choose another path')
    try:
        # Open the file before generating, so that a missing write permission is reported early.
        with new_file(path) as partial, partial.open('w', encoding='utf-8') as file:
            file.writelines(_output_lines(lines, complete()))
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; choose a writable path') from error


def _output_lines(lines: Sequence[Line], rows: Sequence[Sequence[Completion]]) -> Iterator[str]:
    for line, samples in zip(lines, rows, strict=True):
        completions = [{'text': sample.text, 'finish_reason': sample.finish_reason} for sample in samples]
        yield json.dumps({**line.fields, COMPLETIONS: completions}, ensure_ascii=False) + '\n'
