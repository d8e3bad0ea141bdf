"""lm-eval tasks and the CORE metric during training, on the mesh and parameters of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from maxlm.config.schema import Config
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.statistics import Measure
from maxlm.evaluation.tasks.core import evaluate_core
from maxlm.evaluation.tasks.core_bundle import CoreTask, open_bundle, split_bundle
from maxlm.evaluation.tasks.lm_eval_model import LmEvalModel
from maxlm.evaluation.tasks.lm_eval_tasks import Benchmarks, measures
from maxlm.inference.load import LoadedModel
from maxlm.inference.scoring import LogprobScorer
from maxlm.parallel.layout import Layout
from maxlm.training.state import Params

PREFIX = 'eval/tasks/'


class Tasks:
    """Runs the tasks of `eval.tasks`. All processes must take part, and all receive the same scores."""

    def __init__(
        self,
        benchmarks: Benchmarks | None,
        core: Sequence[CoreTask],
        config: Config,
        layout: Layout,
        tokenizer_path: Path,
    ):
        self._benchmarks, self._core = benchmarks, core
        self._tokenizer = Tokenizer.load(tokenizer_path)
        # The step is unused here.
        model = LoadedModel(config, layout, None, self._tokenizer, tokenizer_path, 0)
        self._scorer = LogprobScorer(model)
        self._lm_eval_model = LmEvalModel(model, self._scorer, None)

    def __call__(self, params: Params) -> dict[str, float]:
        """Runs the tasks and returns {metric: value}.

        Raises:
            InputError: the data of a task cannot be loaded, or an answer is longer than the context of the model.
        """
        self._scorer.params = params
        found: list[Measure] = []
        try:
            if self._core:
                prefix = self._tokenizer.context_free_prefix
                found += evaluate_core(self._core, self._scorer, self._tokenizer, prefix).measures
            if self._benchmarks is not None:
                found += measures(self._benchmarks.run(self._lm_eval_model))
        finally:
            # Release the parameters, because the next training step replaces them.
            self._scorer.params = None
        return {PREFIX + measure.name: measure.value for measure in found}


def open_tasks(config: Config, layout: Layout, tokenizer_path: Path) -> Tasks | None:
    """Opens the tasks of a run. Returns None if it has none.

    Raises:
        InputError: lm-eval is not installed, a task does not exist, or a task requires text generation.
    """
    if not config.eval.tasks:
        return None
    limit = config.eval.tasks_limit or None
    bundle, names = split_bundle(config.eval.tasks, 'eval.tasks')
    core = open_bundle(bundle, limit=limit, key='eval.tasks') if bundle else []
    benchmarks = _open_benchmarks(names, limit) if names else None
    return Tasks(benchmarks, core, config, layout, tokenizer_path)


def _open_benchmarks(names: Sequence[str], limit: int | None) -> Benchmarks:
    benchmarks = Benchmarks(names, limit=limit, key='eval.tasks')
    generative = [name for name, kind in benchmarks.output_types().items() if kind == 'generate_until']
    if generative:
        raise InputError(
            f'eval.tasks: {", ".join(generative)} generates text, which requires a key-value cache in addition to the '
            f'training state; use log-likelihood tasks here, and run this one with maxlm evaluate'
        )
    return benchmarks


def task_text(scores: Mapping[str, float]) -> str:
    """Formats the scores for the log."""
    return 'tasks ' + '  '.join(f'{name.removeprefix(PREFIX)} {value:.4f}' for name, value in scores.items())
