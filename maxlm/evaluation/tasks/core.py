"""The CORE metric: mean accuracy over the tasks of a bundle, scaled so that random answers score 0.

    CORE = mean over tasks of (accuracy − random baseline) / (1 − random baseline)

Li et al., DataComp-LM (2024), arXiv:2406.11794, section 3.5. Prompts and scores follow nanochat's `core_eval.py`, so
that the numbers can be compared with those that it reports. There are two intended differences: contexts that are too
long keep one more token, because the last token of a continuation is not an input; and a continuation has at least one
token if one choice is the beginning of another.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.statistics import Measure, mean_of
from maxlm.evaluation.tasks.core_bundle import LANGUAGE_MODELING, SCHEMA, CoreTask
from maxlm.inference.scoring import LogprobScorer, ScoringRequest

NAME = 'core'
# Seed of the few-shot examples of the first question. Each question has its own.
FEWSHOT_SEED = 1234


class CoreResults(NamedTuple):
    """Results of a bundle.

    Attributes:
        measures: `core`, and `core/TASK/acc` and `core/TASK/centered` of each task.
        records: one JSON object per example, by `core_TASK`.
    """

    measures: list[Measure]
    records: dict[str, list[dict[str, Any]]]


def evaluate_core(
    tasks: Sequence[CoreTask], scorer: LogprobScorer, tokenizer: Tokenizer, prefix: Sequence[int], *, show: bool = False
) -> CoreResults:
    """Scores all examples of a bundle.

    Args:
        tasks: tasks of the bundle.
        scorer: scorer of the model.
        tokenizer: tokenizer of the model.
        prefix: ids before each prompt.
        show: show a progress bar for each task.

    Raises:
        InputError: an answer is longer than the context of the model.
    """
    records = {f'{NAME}_{task.label}': _score(task, scorer, tokenizer, prefix, show=show) for task in tasks}
    correct = [np.array([record['correct'] for record in found], np.float64) for found in records.values()]
    measures = []
    for task, values in zip(tasks, correct, strict=True):
        centered = (values - task.baseline) / (1 - task.baseline)
        measures.append(mean_of(f'{NAME}/{task.label}/acc', values))
        measures.append(mean_of(f'{NAME}/{task.label}/centered', centered))
    return CoreResults([_core(measures[1::2]), *measures], records)


def _core(centered: Sequence[Measure]) -> Measure:
    """Returns the mean over tasks, whose error contains only the sampling of examples and not that of tasks."""
    value = float(np.mean([task.value for task in centered]))
    deviations, weights = [], []
    for task in centered:
        assert task.values is not None
        # With the mean of the task replaced by the total mean, differences between tasks do not count as noise, and
        # `difference` can compare two checkpoints example by example.
        deviations.append(task.values - task.value)
        weights.append(np.full(len(task.values), 1 / len(task.values)))
    return mean_of(NAME, np.concatenate(deviations) + value, np.concatenate(weights))


def _score(
    task: CoreTask, scorer: LogprobScorer, tokenizer: Tokenizer, prefix: Sequence[int], *, show: bool
) -> list[dict[str, Any]]:
    """Returns a record per example: its line, its loss per token for each answer in nats, and if it is correct."""
    groups = [_requests(task, index, tokenizer, prefix) for index in range(len(task.examples))]
    for example, group in zip(task.examples, groups, strict=True):
        if (longest := max(len(request.continuation) for request in group)) > scorer.max_length:
            raise InputError(
                f'{NAME}/{task.label}: line {example.line} has an answer of {longest} tokens, but the context length '
                f'of the model is {scorer.max_length}; use a model with a longer context'
            )
    scores = iter(scorer.score(list(itertools.chain.from_iterable(groups)), show=show))
    records = []
    for example, group in zip(task.examples, groups, strict=True):
        found = list(itertools.islice(scores, len(group)))
        losses = [-score.log_prob / len(request.continuation) for score, request in zip(found, group, strict=True)]
        is_correct = found[0].is_greedy if task.kind == LANGUAGE_MODELING else int(np.argmin(losses)) == example.gold
        records.append({'line': example.line, 'gold': example.gold, 'correct': is_correct, 'losses': losses})
    return records


def _requests(task: CoreTask, index: int, tokenizer: Tokenizer, prefix: Sequence[int]) -> list[ScoringRequest]:
    """Returns a request per answer of an example.

    The tokens that distinguish the answers are scored. They follow from the tokens and not from the text, because a
    token can contain the end of the context and the start of the continuation.
    """
    examples = ''.join(f'{text}\n\n' for text in _fewshot(task, index))
    contexts = [f'{examples}{context}{task.delimiter}' for context, _ in task.examples[index].candidates]
    prompts = [
        f'{context}{continuation}'
        for context, (_, continuation) in zip(contexts, task.examples[index].candidates, strict=True)
    ]
    encoded = [[*prefix, *ids.tolist()] for ids in tokenizer.encode_batch(prompts)]
    if task.kind == SCHEMA:
        num = _num_common([tokens[::-1] for tokens in encoded])
        starts = [len(tokens) - num for tokens in encoded]
    elif task.kind == LANGUAGE_MODELING:
        # The space at the end of the context is often part of the first token of the continuation.
        (ids,) = tokenizer.encode_batch([contexts[0].rstrip()])
        starts = [_num_common([[*prefix, *ids.tolist()], *encoded])]
    else:
        starts = [_num_common(encoded)] * len(encoded)
    # Both parts of a request have at least one token.
    starts = [min(max(start, len(prefix)), len(tokens) - 1) for start, tokens in zip(starts, encoded, strict=True)]
    return [ScoringRequest(tokens[:start], tokens[start:]) for tokens, start in zip(encoded, starts, strict=True)]


def _fewshot(task: CoreTask, index: int) -> Iterator[str]:
    """Yields the solved examples of a prompt. If there are fewer examples than required, yields all others."""
    num_others = len(task.examples) - 1
    for other in random.Random(FEWSHOT_SEED + index).sample(range(num_others), min(task.num_fewshot, num_others)):
        example = task.examples[other + (other >= index)]
        context, continuation = example.candidates[example.gold]
        yield f'{context}{task.delimiter}{continuation}'


def _num_common(sequences: Sequence[Sequence[int]]) -> int:
    """Returns the number of first elements that all sequences have in common."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
