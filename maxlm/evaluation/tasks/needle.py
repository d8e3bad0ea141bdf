"""Needle-in-a-haystack test: retrieves a fact hidden in a long text, by text length and depth.

After Kamradt 2023, "Needle In A Haystack". The text consists of unrelated sentences, and the fact is a random number. A
trial counts as `choice` if the correct number is more likely than all wrong ones. It counts as `retrieved` if each of
its tokens is the most likely one, so that greedy decoding would generate it.

Shapes: N lengths, D depths.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.statistics import Measure, mean_of
from maxlm.inference.scoring import LogprobScorer, ScoringRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
MIN_LENGTH = 256
CHOICES = 10
FACT = ' The secret number of {place} is {number}.'
QUESTION = ' The secret number of {place} is'
ANSWER = ' {number}'
PLACES = ('Arlen', 'Bexley', 'Corwen', 'Dunmore', 'Elstow', 'Farrow', 'Glenby', 'Hartwell', 'Ingram', 'Jarrow')
FILLER = (
    'The river rises in spring and leaves fine sand on the lower meadows.',
    'Most of the houses on the hill were built of grey stone from the quarry.',
    'A baker who starts before dawn sells the first bread to people on their way to work.',
    'In the library, old maps lie in flat drawers, away from the light.',
    'Wind from the west brings rain, and wind from the east brings clear and cold days.',
    'The ferry crosses the bay when the tide is high enough for its keel.',
    'Children learn the names of trees by their leaves, and later by their bark.',
    'A good path follows the slope and does not fight it.',
    'The clock on the tower is two minutes late, and everyone knows it.',
    'Apples that are stored in a dry cellar keep until the next blossom.',
    'Musicians tune their instruments again when the hall grows warm.',
    'Ships used to wait behind the island until the storm had passed.',
    'The market moves to the square when the hall is too small for it.',
    'Farmers turn the hay twice, so that it dries on both sides.',
    'Letters that arrive on Friday are answered on Monday.',
    'The road to the north is closed in winter, when snow lies on the pass.',
)


class NeedleConfig(NamedTuple):
    """Settings of the test.

    Attributes:
        lengths: text lengths in tokens, including the question and its answer.
        depths: relative positions of the fact.
        trials: number of trials per length and depth.
        seed: seed of the trials.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = DEPTHS
    trials: int = 5
    seed: int = 0


class NeedleResults(NamedTuple):
    """Fractions of successful trials, float64 [N, D]. The chance level of `choice_ND` is 1 / CHOICES."""

    config: NeedleConfig
    choice_ND: np.ndarray
    retrieved_ND: np.ndarray
    measures: list[Measure]


def default_lengths(context: int) -> tuple[int, ...]:
    """Returns powers of two from MIN_LENGTH up to the model's context, and the context."""
    lengths = [MIN_LENGTH]
    while lengths[-1] * 2 < context:
        lengths.append(lengths[-1] * 2)
    return tuple(dict.fromkeys(min(length, context) for length in (*lengths, context)))


def find_needles(
    scorer: LogprobScorer, tokenizer: Tokenizer, config: NeedleConfig, *, show: bool = False
) -> NeedleResults:
    """Runs all trials at all lengths and depths.

    Raises:
        InputError: a length exceeds the model's context, or is too short for fact and question.
    """
    for length in config.lengths:
        if length > scorer.max_length:
            raise InputError(
                f'--needle-lengths: {length} exceeds the context length of the model; use at most {scorer.max_length}'
            )
    N, D = len(config.lengths), len(config.depths)
    requests = list(_requests(tokenizer, config))
    found = scorer.score(requests, show=show)
    log_prob = np.array([score.log_prob for score in found]).reshape(N, D, config.trials, CHOICES)
    is_greedy = np.array([score.is_greedy for score in found]).reshape(log_prob.shape)
    # The first choice is the correct one. A tie counts as a failure.
    choice = np.asarray((log_prob[..., :1] > log_prob[..., 1:]).all(axis=-1))
    retrieved = is_greedy[..., 0]
    measures = []
    for place, length in enumerate(config.lengths):
        measures.append(mean_of(f'needle/{length}/choice', choice[place].ravel()))
        measures.append(mean_of(f'needle/{length}/retrieved', retrieved[place].ravel()))
    return NeedleResults(config, choice.mean(axis=2), retrieved.mean(axis=2), measures)


def _requests(tokenizer: Tokenizer, config: NeedleConfig) -> Iterator[ScoringRequest]:
    """Yields requests for each length, depth and trial: the correct answer first, then the wrong ones."""
    sentences = [ids.tolist() for ids in tokenizer.encode_batch_inside([f' {text}' for text in FILLER])]
    for length in config.lengths:
        for depth in config.depths:
            for trial in range(config.trials):
                # The seed excludes the depth, so a trial has the same fact and filler at every depth.
                rng = random.Random(f'{config.seed} {length} {trial}')
                yield from _trial(tokenizer, sentences, rng, length, depth)


def _trial(
    tokenizer: Tokenizer, sentences: Sequence[list[int]], rng: random.Random, length: int, depth: float
) -> Iterator[ScoringRequest]:
    place = rng.choice(PLACES)
    numbers = rng.sample(range(1000, 10_000), CHOICES)
    texts = [FACT.format(place=place, number=numbers[0]), QUESTION.format(place=place)]
    answers = [ANSWER.format(number=number) for number in numbers]
    fact, question, *continuations = (ids.tolist() for ids in tokenizer.encode_batch_inside([*texts, *answers]))
    beginning = tokenizer.beginning_of_document
    available = length - len(beginning) - len(fact) - len(question) - max(map(len, continuations))
    if available < 0:
        raise InputError(
            f'--needle-lengths: {length} tokens are too few for fact and question; use at least {length - available}'
        )
    haystack: list[list[int]] = []
    while sum(map(len, haystack)) + min(map(len, sentences)) <= available:
        fitting = [sentence for sentence in sentences if len(sentence) <= available - sum(map(len, haystack))]
        haystack.append(rng.choice(fitting))
    # Insert the fact between sentences.
    split = round(depth * len(haystack))
    context = list(itertools.chain(beginning, *haystack[:split], fact, *haystack[split:], question))
    for continuation in continuations:
        yield ScoringRequest(context, continuation)


def draw_needles(results: NeedleResults, title: str) -> Figure:
    """Returns a figure with two heat maps: the fractions of `choice` and of `retrieved` trials."""
    from matplotlib.figure import Figure

    config = results.config
    figure = Figure(figsize=(4.6 + 1.1 * len(config.lengths), 3.6), layout='constrained')
    figure.suptitle(title, fontsize=11, fontweight='bold', x=0.01, ha='left')
    panels = {f'most likely of {CHOICES} numbers': results.choice_ND, 'greedy answer': results.retrieved_ND}
    for axes, (name, fractions_ND) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        image = axes.imshow(fractions_ND.T, vmin=0, vmax=1, cmap='viridis', aspect='auto')
        axes.set_title(name, fontsize=10, loc='left')
        axes.set_xticks(range(len(config.lengths)), [f'{length:,}' for length in config.lengths])
        axes.set_xlabel('text length (tokens)')
        axes.tick_params(length=0)
        for (n, d), fraction in np.ndenumerate(fractions_ND):
            axes.text(n, d, f'{fraction:.2f}', ha='center', va='center', color='black' if fraction > 0.6 else 'white')
    first = figure.axes[0]
    first.set_yticks(range(len(config.depths)), [f'{depth:.0%}' for depth in config.depths])
    first.set_ylabel('depth of the fact')
    figure.colorbar(image, ax=figure.axes, label='fraction of trials')
    return figure
