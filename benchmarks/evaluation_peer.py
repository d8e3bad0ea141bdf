"""One side of `benchmarks.evaluation`, in a separate process: `python -m benchmarks.evaluation_peer SIDE DIRECTORY`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Returns a backend of lm-eval for a batch size.
Backends = Callable[[int], Any]


class Turn(NamedTuple):
    """Results of one side for one task.

    Attributes:
        seconds: duration.
        log_probs: log-probability of each request.
        greedy: True for each request whose tokens are the most likely ones; empty for complete texts.
    """

    seconds: float
    log_probs: list[float]
    greedy: list[bool]


def maxlm(workdir: str) -> Backends:
    """Returns the backend of `maxlm evaluate`, which chooses its batch size."""
    from maxlm.evaluation.tasks.lm_eval_model import LmEvalModel, harness_model
    from maxlm.inference.load import load_model
    from maxlm.inference.scoring import LogprobScorer
    from maxlm.runtime.malloc import disable_malloc_trim

    disable_malloc_trim()
    model = load_model(workdir, num_devices=1)
    backend = harness_model(LmEvalModel(model, LogprobScorer(model), None))
    return lambda _: backend


def transformers(directory: str) -> Backends:
    """Returns lm-eval's Transformers backend in float32."""
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    backends: dict[int, Any] = {}

    def of_batch(size: int) -> Any:
        if size not in backends:
            backends[size] = HFLM(pretrained=directory, device='cpu', dtype='float32', batch_size=size)
        return backends[size]

    return of_batch


SIDES: dict[str, Callable[[str], Backends]] = {'maxlm': maxlm, 'transformers': transformers}


def answer(backend: Any, requests: Sequence[Sequence[str]], *, rolling: bool) -> Turn:
    """Answers requests (context, continuation), or (text,) if `rolling`, and measures the time."""
    from lm_eval.api.instance import Instance

    kind: Any = 'loglikelihood_rolling' if rolling else 'loglikelihood'
    instances = [Instance(kind, {}, tuple(arguments), number) for number, arguments in enumerate(requests)]
    start = time.perf_counter()
    found = getattr(backend, kind)(instances, disable_tqdm=True)
    seconds = time.perf_counter() - start
    if rolling:
        return Turn(seconds, list(found), [])
    return Turn(seconds, [log_prob for log_prob, _ in found], [bool(greedy) for _, greedy in found])


def main(side: str, directory: str) -> None:
    """Loads a model and answers tasks on request until stdin ends."""
    for name in ('lm_eval', 'absl'):
        logging.getLogger(name).setLevel(logging.ERROR)
    answers, hidden = sys.stdout, io.StringIO()
    # Libraries must not print to the stream of answers, or progress bars beside that of the benchmark.
    with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
        backend = SIDES[side](directory)
        print(json.dumps({'threads': len(os.sched_getaffinity(0))}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            turn = answer(backend(asked['batch']), asked['requests'], rolling=asked['rolling'])
            print(json.dumps(turn._asdict()), file=answers, flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
