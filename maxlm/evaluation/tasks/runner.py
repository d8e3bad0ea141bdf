"""Runs evaluation tasks on models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.errors import InputError
from maxlm.evaluation.output import output_directory, write_samples
from maxlm.evaluation.statistics import Measure
from maxlm.evaluation.tasks.code import KINDS, ProgramsConfig, open_suite, solve
from maxlm.evaluation.tasks.core import evaluate_core
from maxlm.evaluation.tasks.core_bundle import open_bundle, split_bundle
from maxlm.evaluation.tasks.lm_eval_model import LmEvalModel
from maxlm.evaluation.tasks.lm_eval_tasks import Benchmarks, measures, write_results
from maxlm.evaluation.tasks.needle import NeedleConfig, NeedleResults, default_lengths, draw_needles, find_needles
from maxlm.evaluation.tasks.questions import QUESTIONS, ask, check_questions
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.requests import Completion, Request
from maxlm.inference.load import LoadedModel
from maxlm.inference.scoring import LogprobScorer
from maxlm.log import progress_bar

NEEDLE = 'needle'


class ParsedTasks(NamedTuple):
    """Tasks by type.

    Attributes:
        benchmarks: task names and paths for lm-eval.
        suites: (kind, path) of code benchmarks.
        needle: run the needle-in-a-haystack test.
        core: path of the evaluation bundle of the CORE metric; '' = none.
        questions: files of questions with exact answers.
    """

    benchmarks: tuple[str, ...]
    suites: tuple[tuple[str, str], ...]
    needle: bool
    core: str = ''
    questions: tuple[str, ...] = ()


def parse_tasks(text: str) -> ParsedTasks:
    """Parses a comma-separated list such as `arc_easy,tasks/mine.yaml,humaneval:HumanEval.jsonl,needle`.

    Raises:
        InputError: an item is empty, or there are several evaluation bundles.
    """
    parts = [part.strip() for part in text.split(',')]
    if not all(parts):
        raise InputError(f'--tasks={text}: must be comma-separated names, e.g. arc_easy,humaneval:HumanEval.jsonl')
    suites, benchmarks, questions = [], [], []
    core, parts = split_bundle(list(dict.fromkeys(parts)), '--tasks')
    for part in parts:
        kind, separator, path = part.partition(':')
        if kind in KINDS and separator and path:
            suites.append((kind, path))
        elif kind == QUESTIONS and separator and path:
            questions.append(path)
        elif part != NEEDLE:
            benchmarks.append(part)
    return ParsedTasks(tuple(benchmarks), tuple(suites), NEEDLE in parts, core, tuple(questions))


class EvalOptions(NamedTuple):
    """Options of tasks.

    Attributes:
        folder: directory of additional lm-eval task files.
        num_fewshot: number of examples in each prompt; None = the default of the task.
        limit: maximum number of documents or problems per task; None = all.
        chat: apply the model's chat template.
        programs: sampling settings of code benchmarks.
        needle_lengths: text lengths of the needle test; None = `default_lengths`.
        needle_trials: number of trials per length and depth.
        num_slots: number of engine slots for generation.
    """

    folder: str = ''
    num_fewshot: int | None = None
    limit: int | None = None
    chat: bool = False
    programs: ProgramsConfig = ProgramsConfig(num_samples=1, max_tokens=512, temperature=0.8, seed=0)
    needle_lengths: tuple[int, ...] | None = None
    needle_trials: int = 5
    num_slots: int = 32


class EvalResult(NamedTuple):
    """Results of one model. `measures` contains all numbers; the other fields are written to files.

    Attributes:
        measures: all metrics.
        benchmarks: results of lm-eval.
        records: one JSON object per program or example, by task.
        needles: results of the needle-in-a-haystack test.
    """

    measures: list[Measure]
    benchmarks: dict[str, Any] | None
    records: dict[str, list[dict[str, Any]]]
    needles: NeedleResults | None

    def write(self, folder: Path, *, step: int, title: str) -> None:
        """Writes results and responses of each task. Raises InputError if a file cannot be written."""
        if self.benchmarks is not None:
            write_results(self.benchmarks, folder, step=step)
        with output_directory(folder):
            for name, records in self.records.items():
                write_samples(folder, name, step, records)
            if self.needles is not None:
                draw_needles(self.needles, f'Needle in a haystack: {title}').savefig(
                    folder / f'needle_{step}.png', dpi=150
                )


class EvalRun:
    """Tasks whose files are read once, before any model is loaded."""

    def __init__(self, parsed: ParsedTasks, config: EvalOptions):
        """Opens the tasks. Raises InputError if a task does not exist or a required package is not installed."""
        self._config, self._needle, self._questions = config, parsed.needle, parsed.questions
        for path in self._questions:
            check_questions(path)
        self._suites = [open_suite(kind, path, limit=config.limit) for kind, path in parsed.suites]
        self._core = open_bundle(parsed.core, limit=config.limit) if parsed.core else []
        self._benchmarks: Benchmarks | None = None
        if parsed.benchmarks:
            self._benchmarks = Benchmarks(
                parsed.benchmarks,
                folder=config.folder,
                num_fewshot=config.num_fewshot,
                limit=config.limit,
                chat=config.chat,
            )

    def run(self, model: LoadedModel, *, show: bool = False) -> EvalResult:
        """Runs all tasks on a model.

        Raises:
            InputError: a task does not fit the model, its data cannot be loaded, or programs cannot be run safely.
        """
        config = self._config
        if config.chat and model.chat is None:
            raise InputError('--apply-chat-template: the checkpoint has no chat template; omit the option')
        chat = model.chat if config.chat else None
        scorer, engine = LogprobScorer(model), _LazyEngine(model, config.num_slots, show=show)
        lm_eval_model = LmEvalModel(model, scorer, engine, show=show)
        all_measures: list[Measure] = []
        records: dict[str, list[dict[str, Any]]] = {}
        if self._core:
            core = evaluate_core(self._core, scorer, model.tokenizer, model.tokenizer.context_free_prefix, show=show)
            all_measures += core.measures
            records |= core.records
        results = None
        if self._benchmarks is not None:
            results = self._benchmarks.run(lm_eval_model)
            all_measures += measures(results)
        for suite in self._suites:
            programs = solve(suite, engine, model.tokenizer, config.programs, chat=chat)
            all_measures += programs.measures
            records[suite.name] = programs.records
        for path in self._questions:
            answered = ask(
                path,
                engine,
                model.chat or model.tokenizer,
                context=model.config.model.max_positions,
                max_tokens=config.programs.max_tokens,
                limit=config.limit,
            )
            all_measures.append(answered.measure)
            records[QUESTIONS] = [*records.get(QUESTIONS, []), *answered.records]
        needles = None
        if self._needle:
            lengths = config.needle_lengths or default_lengths(scorer.max_length)
            needles = find_needles(
                scorer, model.tokenizer, NeedleConfig(lengths, trials=config.needle_trials), show=show
            )
            all_measures += needles.measures
        return EvalResult(all_measures, results, records, needles)


# Smallest context of the engine.
MIN_CONTEXT = 512


class _LazyEngine:
    """Creates the engine at its first use, because its cache needs memory and most tasks do not generate text.

    The cache of all slots has the length of the longest request, rounded up to a power of two. With the context of the
    model, that of a small model with a long context can exceed the memory of the machine.
    """

    def __init__(self, model: LoadedModel, num_slots: int, *, show: bool):
        self._model, self._num_slots, self._show = model, num_slots, show
        self._engine: Engine | None = None

    def complete(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Completes requests and shows the progress. See `Engine.complete`."""
        longest = max((len(request.prompt) + request.max_tokens for request in requests), default=0)
        if self._engine is None or longest > self._engine.max_context:
            # The former cache is released before the new one is allocated.
            self._engine = None
            context = min(max(MIN_CONTEXT, 1 << (longest - 1).bit_length()), self._model.config.model.max_positions)
            self._engine = Engine(self._model, num_slots=self._num_slots, max_context=context)
        with progress_bar('generate', total=len(requests), unit='request', show=self._show) as bar:
            return self._engine.complete(requests, on_done=lambda _: bar.update())
