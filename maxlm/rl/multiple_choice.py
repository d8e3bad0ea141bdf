"""Converts multiple-choice questions to prompts with checkable answers for GRPO, and to texts for pretraining."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.data.documents.document import raise_bad
from maxlm.data.documents.read_options import ReadOptions
from maxlm.data.formats.discovery import find_inputs
from maxlm.data.formats.file_ranges import FileRange, read_documents
from maxlm.data.formats.jsonl import read_objects
from maxlm.errors import InputError
from maxlm.storage.atomic import atomic_write

# Files in the output directory: documents with the answers, and prompts for training and for evaluation.
TEXTS, PROMPTS, HELD_OUT = 'texts.jsonl', 'prompts.jsonl', 'held_out.jsonl'
LETTERS = 'ABCDEFGHIJ'


class QuestionFields(NamedTuple):
    """Names of the fields of a question.

    Attributes:
        question: text of the question.
        options: the options, as a list or as a mapping of letters.
        answer: letter or index (from 0) of the correct option.
    """

    question: str = 'question'
    options: str = 'options'
    answer: str = 'answer_idx'


class Question(NamedTuple):
    """A question with its options and the letter of the correct one."""

    text: str
    options: tuple[str, ...]
    answer: str

    @property
    def prompt(self) -> str:
        """The question and its options, up to the answer."""
        options = (f'{letter}. {option}' for letter, option in zip(LETTERS, self.options, strict=False))
        return '\n'.join([f'Question: {self.text}', *options, 'Answer:'])

    @property
    def document(self) -> str:
        """The prompt with the letter and the text of the correct option."""
        return f'{self.prompt} {self.answer}. {self.options[LETTERS.index(self.answer)]}'

    @property
    def position(self) -> float:
        """A number from 0 to 1 that is a hash of the question, and therefore equal for equal questions."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], 'big') / 2**64


def read_questions(path: str, fields: QuestionFields) -> Iterator[Question]:
    """Yields the questions of a file, a directory or a data set of the hub, as for `maxlm prepare --input`.

    Raises:
        InputError: the input cannot be read, or a record is not a question. The message names the record.
    """
    for file in find_inputs([path]):
        if file.kind == 'jsonl':
            for number, entry in read_objects(file.path):
                yield _question(entry, fields, f'{file.path}:{number}')
            continue
        options = ReadOptions(text_key=fields.question, metadata_keys=(fields.options, fields.answer))
        for document in read_documents(FileRange(file, 0, 0, max(file.size, 1)), options, raise_bad):
            yield _question({fields.question: document.text, **document.metadata}, fields, document.name)


def write_questions(path: str, output: Path, fields: QuestionFields, *, held_out: float) -> tuple[int, int]:
    """Writes the texts and prompts of an input, and returns the numbers of training and of held-out questions.

    Args:
        path: argument of `read_questions`.
        output: directory of the files TEXTS, PROMPTS and HELD_OUT. Held-out questions are only in the latter.
        fields: names of the fields.
        held_out: fraction of the questions that are held out, chosen by a hash.

    Raises:
        InputError: the input has no questions, or as `read_questions`.
    """
    training: list[Question] = []
    evaluation: list[Question] = []
    for question in read_questions(path, fields):
        (evaluation if question.position < held_out else training).append(question)
    if not training:
        raise InputError(f'{path}: contains no questions for training; give other data, or a smaller --held-out')
    output.mkdir(parents=True, exist_ok=True)
    _write(output / TEXTS, [{'text': question.document} for question in training])
    _write(output / PROMPTS, [_task(question) for question in training])
    _write(output / HELD_OUT, [_task(question) for question in evaluation])
    return len(training), len(evaluation)


def _question(entry: Mapping[str, Any], fields: QuestionFields, place: str) -> Question:
    text, options, answer = (entry.get(name) for name in fields)
    if isinstance(options, dict):
        options = [options[key] for key in sorted(options)]
    if not isinstance(text, str) or not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
        raise InputError(
            f'{place}: needs the text {fields.question!r} and 2 to {len(LETTERS)} options in {fields.options!r}; found '
            f'the fields {", ".join(entry) or "none"}; set --question-field and --options-field'
        )
    letters = LETTERS[: len(options)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        answer = letters[answer]
    if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
        raise InputError(
            f'{place}: {fields.answer}={answer!r} is neither one of the letters {letters} nor an index; '
            'set --answer-field'
        )
    return Question(text.strip(), tuple(map(str, options)), answer)


def _task(question: Question) -> dict[str, str]:
    return {'prompt': question.prompt, 'answer': question.answer}


def _write(path: Path, entries: list[dict[str, str]]) -> None:
    atomic_write(path, ''.join(json.dumps(entry, ensure_ascii=False) + '\n' for entry in entries))
