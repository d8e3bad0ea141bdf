"""lm-eval tasks during training, on the mesh and parameters of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlm.config.schema import Config
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.lm_eval_model import LmEvalModel
from maxlm.evaluation.lm_eval_tasks import Benchmarks, measures
from maxlm.inference.load import LoadedModel
from maxlm.inference.scoring import LogprobScorer
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params

PREFIX = 'eval/tasks/'


class Tasks:
    """Runs the tasks of `eval.tasks`. All processes must take part, and all receive the same scores."""

    def __init__(self, benchmarks: Benchmarks, config: Config, layout: Layout, tokenizer_path: Path):
        self._benchmarks = benchmarks
        # The step is unused here.
        model = LoadedModel(config, layout, None, Tokenizer.load(tokenizer_path), tokenizer_path, 0)
        self._scorer = LogprobScorer(model)
        self._lm_eval_model = LmEvalModel(model, self._scorer, None)

    def __call__(self, params: Params) -> dict[str, float]:
        """Runs the tasks and returns {metric: value}.

        Raises:
            InputError: the data of a task cannot be loaded.
        """
        self._scorer.params = params
        try:
            results: Mapping[str, Any] = self._benchmarks.run(self._lm_eval_model)
        finally:
            # Release the parameters, because the next training step replaces them.
            self._scorer.params = None
        return {PREFIX + measure.name: measure.value for measure in measures(results)}


def open_tasks(config: Config, layout: Layout, tokenizer_path: Path) -> Tasks | None:
    """Opens the tasks of a run. Returns None if it has none.

    Raises:
        InputError: lm-eval is not installed, a task does not exist, or a task requires text generation.
    """
    if not config.eval.tasks:
        return None
    limit = config.eval.tasks_limit or None
    benchmarks = Benchmarks(config.eval.tasks, limit=limit, key='eval.tasks')
    generative = [name for name, kind in benchmarks.output_types().items() if kind == 'generate_until']
    if generative:
        raise InputError(
            f'eval.tasks: {", ".join(generative)} generates text, which requires a key-value cache in addition to the '
            f'training state; use log-likelihood tasks here, and run this one with maxlm.evaluate'
        )
    return Tasks(benchmarks, config, layout, tokenizer_path)


def task_text(scores: Mapping[str, float]) -> str:
    """Formats the scores for the log."""
    return 'tasks ' + '  '.join(f'{name.removeprefix(PREFIX)} {value:.4f}' for name, value in scores.items())
