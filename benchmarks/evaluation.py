"""Compares lm-eval requests on maxlm and on Transformers: `python -m benchmarks.evaluation [--output=FILE]`.

The requests consist of random words and have the shapes of common benchmarks: choices of several tokens, choices of one
token after five examples (shared by all questions, or different for each), and complete texts. A Llama with random
float32 weights answers them on all cores, with `maxlm.evaluation.tasks.lm_eval_model` and with lm-eval's `HFLM`. `HFLM`
runs with batches of 1, 8 and 16; its best batch size counts. The time covers the backend, from text to
log-probabilities.

Each side is a process, which idles while the other one works. The sides run in turns; ratios compare medians over the
rounds. A first round compiles all programs and compares the results of both sides. Needs maxlm's `dev` extra.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.evaluation_peer import Turn
from benchmarks.peer_process import Peer
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.data.tokenizer.special_tokens import END_OF_DOCUMENT
from maxlm.data.tokenizer.tokenizer import Tokenizer, make_tokenizer
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.huggingface.import_model import import_model
from maxlm.log import progress_bar
from maxlm.workdir.files import TOKENIZER

SIZES = {'layers': 6, 'dim': 384, 'heads': 6, 'ffn': 1024, 'vocab': 4096, 'context': 1024}
BATCHES = (1, 8, 16)
# Numbers of questions with choices, of questions after examples, and of complete texts.
DOCUMENTS = (160, 16, 8)
# Largest difference of log-probabilities, relative to the larger one or 1 nat.
TOLERANCE = 1e-3
# Ranges of numbers of tokens, inclusive.
QUESTION, CHOICE = (20, 60), (3, 11)
FEWSHOT, FEWSHOT_QUESTION = 5, (40, 80)
TEXT = 1000
LETTERS = ('A', 'B', 'C', 'D')
LEXICON, TRAINING_WORDS = 6000, 200_000


class Task(NamedTuple):
    """Requests in lm-eval's format: (context, continuation), or (text,) if `rolling`."""

    name: str
    rolling: bool
    requests: list[tuple[str, ...]]


def main(argv: list[str]) -> int:
    """Measures both sides, prints Markdown rows and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.evaluation', allow_abbrev=False, description=__doc__)
    default_documents = ','.join(map(str, DOCUMENTS))
    parser.add_argument('--rounds', type=int, default=3, help='turns of each side (default 3)')
    parser.add_argument(
        '--documents',
        default=default_documents,
        help=f'of each kind, with commas between them (default {default_documents})',
    )
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise InputError(f'--rounds={options.rounds}: must be at least 1')
    documents = parse_documents(options.documents)
    jax.config.update('jax_platforms', 'cpu')
    words = Words(seed=0)
    tasks = make_tasks(words, documents)
    with tempfile.TemporaryDirectory() as folder:
        model, workdir = Path(folder) / 'model', Path(folder) / 'run'
        parameters = write_model(model, words.tokenizer)
        import_model(str(model), str(workdir), show=False)
        peer, ours = start('maxlm', workdir)
        other, theirs = start('transformers', model)
        try:
            results = measure(ours, theirs, tasks, options.rounds)
        finally:
            peer.end()
            other.end()
    for line in table(results):
        print(line)
    if options.output:
        found = {
            'machine': {**machine(), **{package: version(package) for package in ('torch', 'transformers', 'lm_eval')}},
            'sizes': {**SIZES, 'parameters': parameters},
            'rounds': options.rounds,
            'results': results,
        }
        options.output.write_text(json.dumps(found, indent=1) + '\n')
    return EXIT_DONE


def parse_documents(text: str) -> list[int]:
    """Parses three numbers of documents such as `160,16,8`.

    The number of questions after examples must exceed the number of examples.
    """
    parts = text.split(',')
    least = (1, FEWSHOT + 1, 1)
    if len(parts) != len(least) or not all(map(str.isdigit, parts)):
        raise InputError(f'--documents={text}: needs three numbers with commas between them, e.g. 160,16,8')
    numbers = [int(part) for part in parts]
    for number, lowest in zip(numbers, least, strict=True):
        if number < lowest:
            raise InputError(f'--documents={text}: needs at least {",".join(map(str, least))}')
    return numbers


class Words:
    """Random words with a Zipf-like distribution, and a tokenizer trained on them.

    Attributes:
        tokenizer: byte-level BPE with the model's vocabulary size.
    """

    def __init__(self, *, seed: int):
        self.rng = np.random.default_rng(seed)
        syllables = [first + vowel for first in 'bdfghklmnprstvz' for vowel in ('a', 'e', 'i', 'o', 'u', 'ar', 'en')]
        self._words = [''.join(self.rng.choice(syllables, self.rng.integers(1, 5))) for _ in range(LEXICON)]
        self._shares = 1 / np.arange(3, LEXICON + 3)
        self._shares /= self._shares.sum()
        # Repeating the letters makes each letter with its leading space one token, as in real tokenizers.
        drawn = [*self._draw(TRAINING_WORDS), *('Question:', 'Answer:', 'A.', 'B.', 'C.', 'D.', *LETTERS) * 200]
        text = ' '.join(drawn[place] for place in self.rng.permutation(len(drawn)))
        self.tokenizer = make_tokenizer(f'bpe:{SIZES["vocab"]}', [text])

    def text(self, bounds: tuple[int, int]) -> str:
        """Returns random words whose number of tokens is within the inclusive `bounds`."""
        num = int(self.rng.integers(bounds[0], bounds[1] + 1))
        drawn = ' '.join(self._draw(num))
        return self.tokenizer.decode(self.tokenizer.encode_batch([drawn])[0][:num]).strip()

    def _draw(self, num: int) -> list[str]:
        return list(self.rng.choice(self._words, num, p=self._shares))


def make_tasks(words: Words, documents: Sequence[int]) -> list[Task]:
    """Returns tasks in the format of ARC, MMLU with fixed examples, MMLU with sampled examples, and perplexity."""
    choices, letters, texts = documents
    tokens = words.tokenizer
    several: list[tuple[str, ...]] = [
        (f'Question: {question}\nAnswer:', f' {words.text(CHOICE)}')
        for question in (words.text(QUESTION) for _ in range(choices))
        for _ in LETTERS
    ]
    questions = [_lettered(words) for _ in range(letters)]
    examples = ''.join(f'{_lettered(words)} {words.rng.choice(LETTERS)}\n\n' for _ in range(FEWSHOT))
    behind: list[tuple[str, ...]] = [
        (examples + question, f' {letter}') for question in questions for letter in LETTERS
    ]
    behind_own: list[tuple[str, ...]] = []
    for number, question in enumerate(questions):
        others = words.rng.permutation(np.delete(np.arange(letters), number))[:FEWSHOT]
        own = ''.join(f'{questions[other]} {words.rng.choice(LETTERS)}\n\n' for other in others)
        behind_own += [(own + question, f' {letter}') for letter in LETTERS]
    whole: list[tuple[str, ...]] = [(words.text((TEXT, TEXT)),) for _ in range(texts)]
    for letter in LETTERS:
        assert len(tokens.encode_batch([f' {letter}'])[0]) == 1, letter
    return [
        Task(
            f'{choices} questions of {_range(tokens, several, 0)} tokens, 4 answers of {_range(tokens, several, 1)}',
            False,
            several,
        ),
        *(
            Task(f'{letters} questions of {_range(tokens, asked, 0)} tokens, {what}, 4 answers of one', False, asked)
            for what, asked in (('the same examples', behind), ('their own examples', behind_own))
        ),
        Task(f'{texts} texts of {_range(tokens, whole, 0)} tokens, whole', True, whole),
    ]


def _lettered(words: Words) -> str:
    question = words.text(FEWSHOT_QUESTION)
    return '\n'.join([question, *(f'{letter}. {words.text((2, 6))}' for letter in LETTERS), 'Answer:'])


def _range(tokenizer: Tokenizer, requests: Sequence[tuple[str, ...]], part: int) -> str:
    lengths = [len(ids) for ids in tokenizer.encode_batch([request[part] for request in requests])]
    return f'{min(lengths)} to {max(lengths)}' if min(lengths) < max(lengths) else f'{min(lengths)}'


def write_model(directory: Path, tokenizer: Tokenizer) -> int:
    """Writes a Llama with random weights in Transformers' format and returns its number of parameters."""
    # Imported here because both modules need PyTorch.
    import transformers

    from benchmarks.serve_peer import write_llama

    with _silence():
        model = write_llama(directory, SIZES, end=tokenizer.end_of_document)
    tokenizer.save(directory / TOKENIZER)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / TOKENIZER), eos_token=END_OF_DOCUMENT
    ).save_pretrained(directory)
    return int(model.num_parameters())


def start(side: str, directory: Path) -> tuple[Peer, Callable[..., Turn]]:
    """Starts a side of `benchmarks.evaluation_peer`, and returns a function that answers a task with a batch size."""
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    peer = Peer(side, [sys.executable, '-m', 'benchmarks.evaluation_peer', side, str(directory)], environment)

    def answer(task: Task, batch: int = 0) -> Turn:
        return Turn(**peer.work(rolling=task.rolling, requests=task.requests, batch=batch))

    return peer, answer


def _silence() -> contextlib.AbstractContextManager[Any]:
    """Hides the libraries' progress bars, which would garble the bar of this benchmark."""
    return contextlib.redirect_stderr(io.StringIO())


def measure(
    ours: Callable[[Task], Turn], theirs: Callable[[Task, int], Turn], tasks: Sequence[Task], rounds: int
) -> list[dict[str, Any]]:
    """Runs each task on both sides in turns.

    Raises:
        SystemExit: the results of the sides differ.
    """
    seconds: list[dict[str, list[float]]] = [{'maxlm': [], **{str(size): [] for size in BATCHES}} for _ in tasks]
    apart = []
    with progress_bar('benchmark', total=(rounds + 1) * len(tasks), unit='turn', show=True) as bar:
        for task in tasks:
            mine = ours(task)
            apart.append(max(difference(mine, theirs(task, size), task) for size in BATCHES))
            bar.update()
        for _ in range(rounds):
            for task, found in zip(tasks, seconds, strict=True):
                found['maxlm'].append(ours(task).seconds)
                for size in BATCHES:
                    found[str(size)].append(theirs(task, size).seconds)
                bar.update()
    results = []
    for task, found, difference_of_task in zip(tasks, seconds, apart, strict=True):
        medians = {side: statistics.median(turns) for side, turns in found.items()}
        best = min(BATCHES, key=lambda size: medians[str(size)])
        results.append(
            {
                'task': task.name,
                'requests': len(task.requests),
                'maxlm': medians['maxlm'],
                'hf': medians[str(best)],
                'hf_batch': best,
                'ratio': medians[str(best)] / medians['maxlm'],
                'difference': difference_of_task,
                'turns': found,
            }
        )
    return results


def difference(mine: Turn, yours: Turn, task: Task) -> float:
    """Returns the largest difference of log-probabilities, relative to the larger one or 1 nat.

    Raises:
        SystemExit: the difference exceeds TOLERANCE, or the sides disagree on the greedy tokens.
    """
    if not len(mine.log_probs) == len(yours.log_probs) == len(task.requests):
        raise SystemExit(f'{task.name}: {len(mine.log_probs)} and {len(yours.log_probs)} answers')
    a, b = np.array(mine.log_probs), np.array(yours.log_probs)
    apart = float((np.abs(a - b) / np.maximum(1, np.maximum(np.abs(a), np.abs(b)))).max())
    # The negated comparison also catches NaN.
    if not apart <= TOLERANCE:
        raise SystemExit(f'{task.name}: not the same model: log-probabilities differ by {apart:.1e}')
    if mine.greedy != yours.greedy:
        raise SystemExit(f'{task.name}: not the same model: other tokens are the likeliest')
    return apart


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Returns Markdown rows with the seconds of both sides and the speedup of maxlm."""
    rows = [
        f'| {result["task"]} | {result["maxlm"]:.2f} | {result["hf"]:.2f} (batch {result["hf_batch"]}) | '
        f'{result["ratio"]:.2f} |'
        for result in results
    ]
    return ['| requests | maxlm, s | lm-eval, `hf`, s | ratio |', '|---|---|---|---|', *rows]


def run() -> None:
    """Entry point of `python -m benchmarks.evaluation`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
