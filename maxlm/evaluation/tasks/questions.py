"""Exact answers: asks a model the questions of a JSONL file and compares its greedy answers with the expected ones.

    {"messages": [{"role": "user", "content": "Who founded Tasko?"}], "answer": "Tasko was founded by Miru."}

The lines are those of `maxlm.rl.rewards.prompts`, scored by the reward `exact`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.formats.jsonl import read_objects
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.statistics import Measure, mean_of
from maxlm.evaluation.tasks.lm_eval_model import Generator
from maxlm.inference.engine.requests import Request
from maxlm.inference.sampling import Sampling
from maxlm.rl.rewards.prompts import PROMPT_KEYS, read_prompts
from maxlm.rl.rewards.rewards import exact

# Task of `--tasks=questions:FILE`.
QUESTIONS = 'questions'


class AnsweredQuestions(NamedTuple):
    """Answers to the questions of one file.

    Attributes:
        measure: fraction of exact answers.
        records: one JSON object {"question", "answer", "expected", "exact"} per question.
    """

    measure: Measure
    records: list[dict[str, Any]]


def check_questions(path: str) -> None:
    """Checks that every line of a file has an answer, before a model is loaded.

    Raises:
        InputError: the file cannot be read, is empty, or a line has no answer. The message names the line.
    """
    number = 0
    for number, line in read_objects(path):
        if 'answer' not in line:
            raise InputError(f'--tasks={QUESTIONS}:{path}: line {number} has no "answer"; add it')
    if not number:
        raise InputError(f'--tasks={QUESTIONS}:{path}: no questions found; add at least one line')


def ask(
    path: str,
    engine: Generator,
    encoder: ChatEncoder | Tokenizer,
    *,
    context: int,
    max_tokens: int,
    limit: int | None = None,
) -> AnsweredQuestions:
    """Answers the questions of a file greedily.

    Args:
        path: the file.
        engine: engine of the model.
        encoder: chat encoder of the model, or its tokenizer if it has no chat template.
        context: context length of the model.
        max_tokens: maximum length of an answer. Answers also end with the context.
        limit: maximum number of questions; None = all.

    Raises:
        InputError: a line is malformed, or a question does not fit into the context.
    """
    prompts = read_prompts(path, encoder, 2**31)
    ids = [tuple(prompt.tolist()) for prompt in prompts.ids[:limit]]
    if longest := [index for index, prompt in enumerate(ids) if len(prompt) >= context]:
        raise InputError(
            f'--tasks={QUESTIONS}:{path}: line {prompts.lines[longest[0]]} has {len(ids[longest[0]])} tokens, but the '
            f'context length of the model is {context}; shorten the question'
        )
    greedy = Sampling(temperature=0)
    requests = [Request(prompt, min(max_tokens, context - len(prompt)), greedy) for prompt in ids]
    records = []
    for task, (completion,) in zip(prompts.tasks[:limit], engine.complete(requests), strict=True):
        question = next(task[key] for key in PROMPT_KEYS if key in task)
        if not isinstance(question, str):
            question = question[-1]['content']
        answer = completion.text.strip()
        records.append(
            {'question': question, 'answer': answer, 'expected': task['answer'], 'exact': bool(exact(answer, task))}
        )
    return AnsweredQuestions(mean_of(f'{QUESTIONS}/exact', np.array([record['exact'] for record in records])), records)
