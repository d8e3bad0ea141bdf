"""Runs lm-eval tasks, by name or from files, and writes results in lm-eval's format."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.errors import InputError
from maxlm.evaluation.output import output_directory, to_json, write_samples
from maxlm.evaluation.statistics import Measure, exponential_of, mean_of
from maxlm.evaluation.tasks.lm_eval_model import LmEvalModel, harness_model, missing_lm_eval

# Number of bootstrap samples for standard errors of metrics that are not means.
BOOTSTRAPS = 1000
# Metrics for which lm-eval stores (log-probability, number of words or bytes) per document.
RATES = {'word_perplexity': 1.0, 'byte_perplexity': 1.0, 'bits_per_byte': math.log(2)}
YAML = ('.yaml', '.yml')
# Common benchmark names → names in lm-eval 0.4.
ALIASES = {
    'arc': ('arc_easy', 'arc_challenge'),
    'csqa': ('commonsense_qa',),
    'math': ('minerva_math',),
    'medqa': ('medqa_4options',),
    'natural_questions': ('nq_open',),
    'nq': ('nq_open',),
    'siqa': ('social_iqa',),
    'trivia_qa': ('triviaqa',),
}


class Benchmarks:
    """Tasks that are loaded once and can be run on several models.

    A task is given by a name or by the path of a task file. Names are those of lm-eval (`arc_easy`, `mmlu`, …), of a
    directory of task files, and of `ALIASES`. The path of a directory selects all its task files.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        folder: str = '',
        num_fewshot: int | None = None,
        limit: int | None = None,
        chat: bool = False,
        key: str = '--tasks',
    ):
        """Loads the tasks.

        Args:
            tasks: task names, paths of task files, or paths of directories whose task files are all run.
            folder: directory of additional task files, which `tasks` may name.
            num_fewshot: number of examples in each prompt; None = the default of the task.
            limit: maximum number of documents per task; None = all.
            chat: apply the model's chat template to prompts.
            key: name of the option in error messages.

        Raises:
            InputError: lm-eval is not installed, or a task does not exist.
        """
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise missing_lm_eval() from error
        if folder and not Path(folder).is_dir():
            raise InputError(f'--tasks-path={folder}: no such folder; choose an existing folder')
        # lm-eval logs its progress as warnings.
        logging.getLogger('lm_eval').setLevel(logging.ERROR)
        self._settings = {'num_fewshot': num_fewshot, 'limit': limit, 'apply_chat_template': chat}
        folders = [folder] if folder else []
        names = []
        for task in tasks:
            if Path(task).is_dir():
                found = TaskManager(include_path=task, include_defaults=False).all_subtasks
                if not found:
                    raise InputError(f'{key}={task}: no task file found; add a .yaml file with a line `task: NAME`')
                folders.append(task)
                names += found
            elif task.endswith(YAML):
                if not Path(task).is_file():
                    raise InputError(f'{key}={task}: no such file; choose an existing file')
                names.append(task)
            else:
                names.append(task)
        try:
            self._manager = TaskManager(include_path=folders or None, include_defaults=False)
            # Loading lm-eval's own task files takes seconds, so they are loaded only if needed.
            if any(name not in self._manager.all_tasks and not name.endswith(YAML) for name in names):
                self._manager = TaskManager(include_path=folders or None)
        except Exception as error:  # raised by YAML or code of a task file
            raise InputError(f'task files in {", ".join(folders)}: {_one_line(error)}; fix the task file') from error
        known_tasks = set(self._manager.all_tasks)
        aliases = {name: names_of_alias for name, names_of_alias in ALIASES.items() if name not in known_tasks}
        names = [found for name in names for found in aliases.get(name, (name,))]
        for name in names:
            if name not in known_tasks and not name.endswith(YAML):
                similar = [candidate for candidate in sorted(known_tasks) if name.split('_')[0] in candidate][:5]
                hint = f'; similar: {", ".join(similar)}' if similar else ''
                raise InputError(
                    f'{key}={name}: not an lm-eval task, a task file or a folder of task files; check the name{hint}'
                )
        self._names, self._key = names, key

    def output_types(self) -> dict[str, str]:
        """Returns {task: output type}, such as multiple_choice, loglikelihood or generate_until. Groups are expanded.

        Raises:
            InputError: the data of a task cannot be loaded.
        """
        return {name: task.get_config('output_type') for name, task in self._load().items()}

    def documents(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields (task, document) for each document that is evaluated. Groups are expanded.

        Raises:
            InputError: the data of a task cannot be loaded.
        """
        with _as_input_errors(self._key, self._names):
            for name, task in self._load().items():
                for document in itertools.islice(task.eval_docs, self._settings['limit']):
                    yield name, document

    def _load(self) -> Mapping[str, Any]:
        with _as_input_errors(self._key, self._names):
            return self._manager.load(list(self._names))['tasks']

    def run(self, lm_eval_model: LmEvalModel) -> dict[str, Any]:
        """Runs lm-eval's `simple_evaluate` and returns its results.

        Raises:
            InputError: the data of a task cannot be loaded, or a task needs a function that the model does not support.
        """
        from lm_eval import simple_evaluate

        model = harness_model(lm_eval_model)
        # lm-eval forks processes for standard errors, and JAX is not fork-safe.
        os.environ['DISABLE_MULTIPROC'] = '1'
        # lm-eval prints text and progress bars, which must not appear in logs.
        output = sys.stderr if sys.stderr.isatty() else io.StringIO()
        with (
            _as_input_errors(self._key, self._names, AssertionError, MemoryError),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            _quiet_git(),
        ):
            results = simple_evaluate(
                model,
                tasks=list(self._names),
                task_manager=self._manager,
                bootstrap_iters=BOOTSTRAPS,
                **self._settings,
            )
        return dict(results)


@contextlib.contextmanager
def _as_input_errors(key: str, names: Sequence[str], *own: type[Exception]) -> Iterator[None]:
    """Converts errors of data sets, the Hub and task files to errors of one line, except those of the types `own`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (InputError, *own)):
            raise
        raise InputError(
            f'{key}={",".join(names)}: {type(error).__name__}: {_one_line(error)}; check the task and its data'
        ) from error


@contextlib.contextmanager
def _quiet_git() -> Iterator[None]:
    """Keeps `git describe`, which lm-eval runs, from writing its errors to the terminal."""
    from lm_eval import evaluator

    original = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = _git_hash
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = original


def _git_hash() -> str | None:
    try:
        done = subprocess.run(['git', 'describe', '--always'], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def measures(results: Mapping[str, Any]) -> list[Measure]:
    """Returns the metrics of lm-eval's results, with standard errors over documents."""
    found = []
    for task, values in results['results'].items():
        samples = results.get('samples', {}).get(task, [])
        for key, value in values.items():
            metric, _, filter_name = key.partition(',')
            if not filter_name or metric.endswith('_stderr') or isinstance(value, str):
                continue
            name = f'{task}/{metric}' + ('' if filter_name == 'none' else f',{filter_name}')
            error = values.get(f'{metric}_stderr,{filter_name}')
            measure = Measure(name, float(value), float(error) if isinstance(error, int | float) else None)
            document_values = [sample.get(metric) for sample in samples if sample['filter'] == filter_name]
            found.append(_from_documents(measure, metric, document_values) or measure)
    return found


def _from_documents(measure: Measure, metric: str, values: Sequence[Any]) -> Measure | None:
    """Recomputes a metric from its documents, if it is their mean or follows from a mean. Returns None otherwise."""
    if not values or any(value is None or isinstance(value, str | list | dict) for value in values):
        return None
    if metric not in RATES:
        if any(isinstance(value, tuple) for value in values):
            return None
        mean = mean_of(measure.name, np.array(values, np.float64))
        return mean if math.isclose(mean.value, measure.value, rel_tol=1e-6, abs_tol=1e-9) else None
    log_probs, counts = np.array(values, np.float64).T
    mean = mean_of(measure.name, -log_probs / counts / RATES[metric], counts)
    if metric == 'bits_per_byte' or mean.error is None:
        return mean
    return exponential_of(measure.name, mean)._replace(value=measure.value)


def write_results(results: Mapping[str, Any], folder: Path, *, step: int) -> None:
    """Writes `results_STEP.json` and `samples_TASK_STEP.jsonl` in lm-eval's format.

    Raises:
        InputError: the files cannot be written.
    """
    with output_directory(folder):
        without_samples = {name: value for name, value in results.items() if name != 'samples'}
        text = json.dumps(without_samples, indent=2, default=to_json, ensure_ascii=False)
        (folder / f'results_{step}.json').write_text(text + '\n', encoding='utf-8')
        for task, samples in results.get('samples', {}).items():
            write_samples(folder, task, step, samples)


def _one_line(error: Exception) -> str:
    return ' '.join(str(error).split())[:300]
