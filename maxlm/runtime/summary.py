"""What a run says of itself before its first step and after its last."""

from __future__ import annotations

import datetime

import jax

from maxlm.config.keys import Config
from maxlm.data.corpus import Corpus
from maxlm.planning.chips import Peak, find_peak
from maxlm.planning.forecast import Forecast
from maxlm.planning.plan_report import before_a_run
from maxlm.runtime.console import logger
from maxlm.runtime.pace import Pace
from maxlm.runtime.reporter import Reporter
from maxlm.training.decisions import Decisions
from maxlm.training.step import TrainState


def log_start(config: Config, abstract: TrainState, forecast: Forecast) -> Peak:
    """Says what is about to run; returns the peak that MFU is divided by."""
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
    mesh = ' '.join(f'{axis}={size}' for axis, size in config.mesh.sizes.items() if size > 1) or 'one device'
    device = jax.local_devices()[0]
    logger.info(
        f'{num_parameters:,} parameters on {jax.device_count()} × {device.device_kind} ({mesh}); '
        f'step of {config.train.global_batch} × {config.data.window} tokens in {config.accumulation} micro-batch(es) '
        f'of {config.train.micro_batch} per device; attention kernel {config.model.attention}'
    )
    for line in before_a_run(forecast):
        logger.info(line)
    if 0 < config.train.num_steps <= config.optimizer.warmup_steps:
        logger.warning(
            f'the warm-up ({config.optimizer.warmup_steps} steps) is as long as the run or longer '
            f'({config.train.num_steps}): the peak learning rate is never reached'
        )
    peak = find_peak(config.metrics.peak_tflops)
    logger.info(f'MFU counts against {peak.tflops:,.3g} TFLOP/s per device ({peak.source})')
    return peak


def log_end(
    step: int, why: str, *, corpus: Corpus, reporter: Reporter, pace: Pace, decisions: Decisions, seconds: float
) -> None:
    """Says what became of a run.

    Args:
        step: its last.
        why: it is over.
        corpus, reporter, pace, decisions: of the run.
        seconds: of this process.
    """
    logger.info(f'the run is over: {why}')
    perf = pace.read_total()
    mfu = (
        f', MFU {perf["perf/mfu"]:.1%} counted causally ({perf["perf/mfu_full"]:.1%} with full attention)'
        if 'perf/mfu' in perf
        else ''
    )
    logger.info(
        f'done: {step} steps in {datetime.timedelta(seconds=round(seconds))}, '
        f'{perf["perf/tokens_per_second"]:,.0f} tokens/s{mfu}'
    )
    if decisions.hours:
        spent = f', ${decisions.dollars:,.2f}' if decisions.dollars else ''
        logger.info(
            f'all lives of the run: {decisions.hours:.3g} h{spent}, {decisions.step_hours / decisions.hours:.1%} of it '
            f'in steps that count'
        )
    validation = reporter.validation_loss
    validation_text = '' if validation is None else f'; validation loss {validation:.3f}'
    logger.info(
        f'training loss {reporter.last_loss:.3f}{validation_text} nats/token; '
        f'unigram entropy of the validation data {corpus.unigram_entropy:.3f}'
    )
