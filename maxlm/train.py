"""Trains a model: `python -m maxlm.train --config=FILE[:variant] [--workdir=DIR] [--config.section.key=value …]`.

The default workdir is runs/NAME or runs/NAME-VARIANT, where NAME is the name of the config file. To resume a run, run
the same command again: it continues from the newest checkpoint of the workdir. The workdir may be a bucket (gs://…,
s3://…). --resume=WORKDIR[@STEP] continues from a checkpoint of another workdir.

Exit codes: 0 done; 1 the loss or the gradients are not finite, or spike, despite rollbacks; 2 bad input; 75 preempted
(SIGTERM, Ctrl-C or a maintenance event), or a bucket does not respond: run the same command again. If one of several
processes (see `maxlm.runtime.initialize`) is lost or hangs, all processes exit with 75.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from maxlm.errors import InputError, exit_on_sigterm

if __name__ == '__main__':
    # Must precede the other imports, which take seconds.
    exit_on_sigterm(importing=True)

from maxlm.config.schema import Config
from maxlm.data.loader.background import background_preparation, hub_entries
from maxlm.data.loader.dataset import check_objective, open_training_data
from maxlm.runtime.barrier import ProcessGroup, is_shared
from maxlm.trainer import main as runs
from maxlm.trainer.batch_source import TextBatches


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains on prepared data; `began` as in `runs.main`."""
    return runs.main(
        argv,
        open_feed,
        prog='maxlm train',
        description=__doc__,
        example='--config=configs/tiny.py --workdir=runs/first',
        began=began,
    )


def open_feed(config: Config, stack: contextlib.ExitStack) -> tuple[TextBatches, int]:
    """Opens the data set of a config; see `runs.OpenSource`."""
    if config.train.objective == 'grpo':
        raise InputError('train.objective=grpo: not supported by maxlm.train; use `python -m maxlm.grpo`')
    if hub_entries(config.data):
        _prepare(config, stack)
    corpus = open_training_data(config.data, with_sources=config.metrics.per_source_loss)
    check_objective(config, corpus.first)
    return TextBatches(corpus), corpus.first.vocab_size


def _prepare(config: Config, stack: contextlib.ExitStack) -> None:
    """Starts the preparation of the hub's data sets in process 0, until the end of the run."""
    together, cache = ProcessGroup(), Path(config.data.cache_dir).expanduser()
    if together.process_index == 0:
        cache.mkdir(parents=True, exist_ok=True)
    together.barrier()
    if not is_shared(cache):
        raise InputError(
            f'data.cache_dir={config.data.cache_dir} is not the same directory for all processes, but process 0 '
            'prepares the data there; set it to a directory that all machines share'
        )
    if together.process_index == 0:
        stack.enter_context(background_preparation(config.data))
    together.barrier()


def run() -> None:
    """Entry point of `python -m maxlm.train` and `maxlm train`."""
    runs.start(main)


if __name__ == '__main__':
    run()
