"""Train a model: `python -m maxlm.train --config=FILE[:variant] [--workdir=DIR] [--config.section.key=value …]`.

The default workdir is runs/NAME or runs/NAME-VARIANT, by the name of the config file. Started again on its workdir, a
run goes on where its newest checkpoint left it. The workdir may be in a bucket, gs://…
or s3://…; --resume=WORKDIR[@STEP] is where a new one goes on from. Exit codes: 0 done; 1 the loss or gradient is not
finite any more, or spikes, in spite of going back; 2 bad input; 75 told to stop (SIGTERM, Ctrl-C, a notice of the
machine) with the state saved, or a bucket does not answer: start again. Of several processes (see
`maxlm.runtime.initialize`) all end together, with 75 too when one was lost or stuck.
"""

from __future__ import annotations

import contextlib

from maxlm.errors import InputError, exit_on_sigterm

if __name__ == '__main__':
    # Before the other imports, which take seconds.
    exit_on_sigterm(importing=True)

from maxlm.config.schema import Config
from maxlm.data.loader.dataset import check_objective, open_training_data
from maxlm.trainer import main as runs
from maxlm.trainer.batch_source import TextBatches


def main(argv: list[str], *, began: float | None = None) -> int:
    """Trains on prepared data; `began` as for `runs.main`."""
    return runs.main(argv, open_feed, prog='maxlm.train', description=__doc__, began=began)


def open_feed(config: Config, stack: contextlib.ExitStack) -> tuple[TextBatches, int]:
    """See `runs.OpenFeed`."""
    del stack
    if config.train.objective == 'grpo':
        raise InputError('train.objective=grpo learns from what the model writes: start it by python -m maxlm.grpo')
    corpus = open_training_data(config.data, with_sources=config.metrics.per_source_loss)
    check_objective(config, corpus.first)
    return TextBatches(corpus), corpus.first.vocab_size


def run() -> None:
    """Entry of `python -m maxlm.train` and `maxlm train`."""
    runs.start(main)


if __name__ == '__main__':
    run()
