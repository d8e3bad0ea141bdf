"""HumanEval and MBPP: runs programs written by the model against the problems' tests in the sandbox.

Problems are read from the files published by the authors (`HumanEval.jsonl`, `mbpp.jsonl`, optionally compressed).
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError, os_message
from maxlm.evaluation.statistics import Measure, mean_of
from maxlm.evaluation.tasks.lm_eval_model import Generator
from maxlm.inference.engine.requests import Request
from maxlm.inference.prompts import text_prompt
from maxlm.inference.sampling import Sampling
from maxlm.rl.rewards.scorer import RewardScorer, is_correct, pass_at_k
from maxlm.storage.json_text import parse_lines
from maxlm.storage.regular_files import read_bytes

# Stop strings of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", which mark the end of the
# function body, and the start of text after a code block.
HUMANEVAL_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint', '\n```')
# Strings after which the tests of a problem or text would follow.
MBPP_STOPS = ('\nclass', '\nassert', '\n"""', '\nprint', '\nif', '\n```')
# Problem numbers of the test split in Austin et al. 2021, "Program Synthesis with Large Language Models".
MBPP_TEST = range(11, 511)
# pass@k is reported for each k up to the number of samples.
REPORTED_K = (1, 10, 100)


class Problem(NamedTuple):
    """A prompt and the task with which the sandbox scores its completions.

    Attributes:
        name: task id.
        prompt: text to complete.
        task: task of the reward scorer.
        chat_prompt: user message for chat models.
        response_prefix: start of the response of a chat model. The rest is scored as a completion of `prompt`.
    """

    name: str
    prompt: str
    task: dict[str, Any]
    chat_prompt: str
    response_prefix: str


class ProgramsConfig(NamedTuple):
    """Sampling settings of programs. A single sample is greedy; `temperature` applies to two or more samples."""

    num_samples: int
    max_tokens: int
    temperature: float
    seed: int


class ProgramResults(NamedTuple):
    """Results of one suite.

    Attributes:
        measures: pass@k for each reported k.
        rewards: float32 [problems, samples]; 1 = all tests passed.
        records: one JSON object per sample.
    """

    measures: list[Measure]
    rewards: np.ndarray
    records: list[dict[str, Any]]


class Suite(NamedTuple):
    """Problems of one benchmark."""

    name: str
    problems: list[Problem]
    stops: tuple[str, ...]


def open_suite(kind: str, path: str, *, limit: int | None = None) -> Suite:
    """Reads the problems of a file.

    Args:
        kind: one of KINDS.
        path: file of the benchmark.
        limit: maximum number of problems; None = all.

    Raises:
        InputError: the file cannot be read or has another format.
    """
    parse, stops = KINDS[kind]
    problems = []
    for number, row in enumerate(_read_rows(path), start=1):
        try:
            problem = parse(row)
        except (KeyError, TypeError, ValueError) as error:
            reason = f'has no {error}' if isinstance(error, KeyError) else str(error)
            raise InputError(
                f'--tasks={kind}:{path}: line {number} {reason}; found keys: {", ".join(row)}; use a {kind} file'
            ) from error
        if problem is not None:
            problems.append(problem)
    if not problems:
        detail = f' with task_id {MBPP_TEST[0]} to {MBPP_TEST[-1]} (the test split)' if kind == 'mbpp' else ''
        raise InputError(f'--tasks={kind}:{path}: no problems found{detail}; add at least one')
    return Suite(kind, problems[:limit], stops)


def solve(
    suite: Suite, engine: Generator, tokenizer: Tokenizer, config: ProgramsConfig, *, chat: ChatEncoder | None = None
) -> ProgramResults:
    """Generates `num_samples` programs for each problem and scores them.

    Args:
        suite: the problems.
        engine: engine of the model.
        tokenizer: tokenizer of the model.
        config: sampling settings.
        chat: chat encoder. Prompts are then user messages, and the start of the response is given. None = the model
            continues the prompt as text.

    Raises:
        InputError: a problem does not fit into the model's context, the chat template rejects a prompt, or this machine
            cannot run programs safely.
    """
    S = config.num_samples
    sampling = Sampling(temperature=0) if S == 1 else Sampling(temperature=config.temperature, top_p=0.95)
    requests = [
        Request(tuple(ids.tolist()), config.max_tokens, sampling, seed=config.seed, num_samples=S, stops=suite.stops)
        for ids in _prompts(suite.problems, tokenizer, chat)
    ]
    # Start the sandbox before hours of generation, so that a machine that cannot run programs is reported early.
    with RewardScorer('all_tests') as scorer:
        completions = [[sample.text for sample in samples] for samples in engine.complete(requests)]
        responses = [text for samples in completions for text in samples]
        tasks = [problem.task for problem in suite.problems for _ in range(S)]
        rewards = scorer.score(responses, tasks).rewards.reshape(-1, S)
    passed = is_correct(rewards).sum(axis=1)
    measures = [
        mean_of(f'{suite.name}/pass@{k}', np.array([pass_at_k(S, int(c), k) for c in passed]))
        for k in REPORTED_K
        if k <= S
    ]
    records = [
        {'task_id': problem.name, 'completion': text, 'passed': bool(is_correct(reward))}
        for problem, texts, row in zip(suite.problems, completions, rewards, strict=True)
        for text, reward in zip(texts, row, strict=True)
    ]
    return ProgramResults(measures, rewards, records)


def _prompts(problems: Sequence[Problem], tokenizer: Tokenizer, chat: ChatEncoder | None) -> list[np.ndarray]:
    if chat is None:
        return [np.array(text_prompt(tokenizer, problem.prompt), np.uint32) for problem in problems]
    try:
        chat_prompts = [chat.encode_prompt([{'role': 'user', 'content': problem.chat_prompt}]) for problem in problems]
    except ChatError as error:
        raise InputError(f'--apply-chat-template: {error}; fix the chat template, or omit the option') from error
    response_prefixes = tokenizer.encode_batch_inside([problem.response_prefix for problem in problems])
    return [np.concatenate(pair) for pair in zip(chat_prompts, response_prefixes, strict=True)]


def _humaneval(row: Mapping[str, Any]) -> Problem:
    prompt, entry = str(row['prompt']), str(row['entry_point'])
    tests = f'{row["test"]}\n\ncheck({entry})\n'
    response_prefix = f'```python\n{prompt}'
    chat_prompt = f'Complete the function `{entry}` in Python:\n\n{response_prefix.rstrip()}\n```'
    # The prompt ends inside the function that the completion continues.
    return Problem(str(row['task_id']), prompt, {'prefix': prompt, 'tests': tests}, chat_prompt, response_prefix)


def _mbpp(row: Mapping[str, Any]) -> Problem | None:
    if int(row['task_id']) not in MBPP_TEST:
        return None
    tests = list(row['test_list'])
    # Prompt of Fried et al. 2023, "InCoder": the task and one test in a docstring. The sanitized file uses `prompt`.
    text = row['text'] if 'text' in row else row['prompt']
    prompt = f'"""\n{text}\n{tests[0]}\n"""\n'
    imports = [str(row.get('test_setup_code') or ''), *row.get('test_imports', ())]
    task = {'tests': [text for text in (*imports, *tests) if text]}
    chat_prompt = f'{text}\n\nWrite it in Python, such that this holds:\n\n```python\n{tests[0]}\n```'
    return Problem(str(row['task_id']), prompt, task, chat_prompt, '```python\n')


KINDS: dict[str, tuple[Callable[[Mapping[str, Any]], Problem | None], tuple[str, ...]]] = {
    'humaneval': (_humaneval, HUMANEVAL_STOPS),
    'mbpp': (_mbpp, MBPP_STOPS),
}


def _read_rows(path: str) -> list[dict[str, Any]]:
    try:
        content = read_bytes(path)
        rows = [row for _, row in parse_lines(gzip.decompress(content) if path.endswith('.gz') else content)]
    except (OSError, EOFError) as error:
        reason = os_message(error) if isinstance(error, OSError) else 'unexpected end of file'
        raise InputError(f'{path}: {reason}; choose a readable file') from error
    except ValueError as error:
        raise InputError(f'{path}: invalid JSON Lines: {error}; fix the file') from error
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(f'{path}: every line must be a JSON object')
    return rows
