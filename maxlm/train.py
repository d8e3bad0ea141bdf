"""Trains a model: `python -m maxlm.train --config=FILE[:variant] [--workdir=DIR] [--config.section.key=value …]`.

The default workdir is runs/NAME or runs/NAME-VARIANT, where NAME is the name of the config file. A run that is
restarted with its workdir resumes from the newest checkpoint. The workdir may be a URL (gs://…, s3://…).
--resume=WORKDIR[@STEP] starts a new workdir from a checkpoint of another run. Exit codes: 0 done; 1 the loss or
gradient is not finite or spikes, despite rollbacks; 2 bad input; 75 the state is saved, start the command again. A run
exits with 75 after SIGTERM, Ctrl-C or a maintenance event, or if a bucket does not respond. Multiple processes (see
`maxlm.runtime.initialize`) exit together, also with 75 if one of them was lost or hung.
"""

from __future__ import annotations

import contextlib

from maxlm.errors import InputError, exit_on_sigterm

if __name__ == '__main__':
    # Must precede the other imports, which take seconds.
    exit_on_sigterm(importing=True)

from maxlm.config.schema import Config
from maxlm.data.loader.dataset import check_objective, open_training_data
from maxlm.trainer import main as runs
from maxlm.trainer.batch_source import TextBatches


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains on prepared data; `began` as in `runs.main`."""
    return runs.main(argv, open_feed, prog='maxlm.train', description=__doc__, began=began)


def open_feed(config: Config, stack: contextlib.ExitStack) -> tuple[TextBatches, int]:
    """Opens the data set of a config; see `runs.OpenSource`."""
    del stack
    if config.train.objective == 'grpo':
        raise InputError('train.objective=grpo learns from what the model writes: start it by python -m maxlm.grpo')
    corpus = open_training_data(config.data, with_sources=config.metrics.per_source_loss)
    check_objective(config, corpus.first)
    return TextBatches(corpus), corpus.first.vocab_size


def run() -> None:
    """Entry point of `python -m maxlm.train` and `maxlm train`."""
    runs.start(main)


if __name__ == '__main__':
    run()
