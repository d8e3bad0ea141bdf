"""Train a model: `python -m maxlm.train --config=FILE[:variant] --workdir=DIR [--config.section.key=value …]`.

Started again on its workdir, a run goes on where its newest checkpoint left it. Exit codes: 0 done; 1 the loss is not
finite any more; 2 bad input; 75 told to stop (SIGTERM or Ctrl-C), with the state saved: start again. Of several
processes (see `maxlm.runtime.distributed`) all end together, with 75 too when one was lost or stuck.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from maxlm.config.keys import Config
from maxlm.config.load import load, split_overrides
from maxlm.config.resolve import resolve
from maxlm.data.batches import iterate
from maxlm.data.corpus import Corpus, open_corpus
from maxlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ArgumentParser, exit_code
from maxlm.planning.chips import Peak, find_peak
from maxlm.planning.compile import compile_train_step
from maxlm.planning.flops import training_flops
from maxlm.planning.forecast import Forecast
from maxlm.planning.plan_report import before_a_run
from maxlm.runtime.checkpoint import Checkpoints, saved_steps
from maxlm.runtime.console import Console, logger, progress_bar
from maxlm.runtime.distributed import join
from maxlm.runtime.evaluation import Evaluation, evaluate
from maxlm.runtime.metrics import MetricWriter, lowest_loss
from maxlm.runtime.pace import Pace
from maxlm.runtime.peers import Peers
from maxlm.runtime.preemption import StopRequest
from maxlm.runtime.preflight import Ready, prepare_step, sample_config
from maxlm.runtime.rendezvous import NotTogetherError
from maxlm.runtime.reporter import Reporter
from maxlm.runtime.sources import SourceReport
from maxlm.runtime.start import check_init_from, start_state
from maxlm.runtime.watchdog import Watchdog
from maxlm.runtime.workdir import describe_run, local_path, open_workdir
from maxlm.training.sharding import Layout, make_layout
from maxlm.training.step import TrainState, abstract_state, evaluated_params, make_eval_step


def main(argv: list[str]) -> int:
    """Reads the command line, checks everything that can be checked without training, and trains."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='maxlm.train', allow_abbrev=False, description=__doc__)
    parser.add_argument(
        '--config', required=True, help='configs/x.py, with a variant as configs/x.py:big, or a config.json'
    )
    parser.add_argument('--workdir', required=True, type=local_path, help='directory of the run; made if need be')
    options = parser.parse_args(rest)

    try:
        join()
    except NotTogetherError as error:
        error.leave()
    with Peers() as peers:
        return _prepare(options.config, overrides, options.workdir, peers)


def _prepare(path: str, overrides: list[str], workdir: Path, peers: Peers) -> int:
    config = load(path, overrides)
    corpus = open_corpus(config.data, tell_sources=config.metrics.by_source)
    resolver = partial(
        resolve,
        platform=jax.default_backend(),
        num_devices=jax.device_count(),
        vocab_size=corpus.first.vocab_size,
        windows=corpus.training_windows,
    )
    # What is quickly refused, before anything is compiled.
    sample = sample_config(config, resolver)
    check_init_from(sample, abstract_state(sample, make_layout(sample.mesh)).params, workdir)
    if jax.process_index() == 0:
        open_workdir(workdir, sample)
    with Console(process=jax.process_index()):
        first_step = max(saved_steps(workdir), default=0)
        ready = prepare_step(config, resolver, num_sources=len(corpus.names), first_step=first_step)
    with Console(workdir, process=jax.process_index()):
        return train(ready, corpus, workdir, peers)


def train(ready: Ready, corpus: Corpus, workdir: Path, peers: Peers) -> int:
    """Runs a config from its newest checkpoint, or from the start, to its last step; returns the exit code."""
    started = time.perf_counter()
    config, layout, abstract, forecast = ready
    num_steps = config.train.num_steps
    facts = corpus.fingerprint(config.train.global_batch)
    with contextlib.ExitStack() as stack:
        on_first_process = jax.process_index() == 0
        watchdog = Watchdog(config.train.stuck_seconds, peers, workdir if on_first_process else None)
        stack.enter_context(watchdog)
        stop = stack.enter_context(StopRequest())
        # Leaving the stack, after an error too, brings to disk what was saved.
        checkpoints = stack.enter_context(Checkpoints(workdir, keep_last=config.checkpoint.keep_last))
        state = start_state(
            config, dataset=corpus.first, layout=layout, abstract=abstract, checkpoints=checkpoints, facts=facts
        )
        start, skipped = int(state.step), int(state.skipped)
        if start >= num_steps:
            logger.info(f'already at step {start} of {num_steps}: nothing to do')
            return EXIT_DONE

        if on_first_process:
            describe_run(workdir, config, corpus.first.tokenizer_path)
        rows = layout.local_rows(config.train.global_batch)
        cuts = tuple((first_step, config.data.window // window) for first_step, window in config.contexts)
        training_data = corpus.train_batches(config.train.global_batch, rows, cuts)
        # Before the compiler is at work: by the first step it is ahead.
        fetcher = stack.enter_context(corpus.fetcher(training_data, start, logger.warning))
        validate_on = _make_validation(config, corpus, layout, rows) if config.eval.every else None
        current = config.at_context(config.context_at(start))
        compiled = forecast.compiled
        if compiled is None or forecast.config.data.window != current.data.window:
            compiled = compile_train_step(current, layout, abstract, len(corpus.names))
        pace = Pace(
            tokens_per_step=config.train.global_batch * config.data.window,
            flops=training_flops(config.model, current.data.window),
            peak=_log_start(current, abstract, forecast),
            num_devices=jax.device_count(),
        )
        sources = SourceReport(corpus)
        sources.log_start(num_steps * config.train.global_batch)
        writer = None
        if on_first_process:
            writer = MetricWriter(workdir, after_step=start, tensorboard=config.metrics.tensorboard)
            stack.callback(writer.close)
        show_bar = config.metrics.progress and on_first_process
        reporter = Reporter(
            config,
            writer=writer,
            pace=pace,
            bar=stack.enter_context(progress_bar(total=num_steps, initial=start, unit='step', show=show_bar)),
            windows_per_epoch=corpus.training_windows,
            sources=sources,
            skipped=skipped,
            # The file is about to be written anew, by the first process.
            best_loss=lowest_loss(workdir) if on_first_process else math.inf,
        )
        batches = stack.enter_context(contextlib.closing(iterate(training_data, start, config.data, num_steps)))

        pace.start()
        watchdog.start()
        for step in range(start + 1, num_steps + 1):
            if config.context_at(step - 1) != current.data.window:
                # What was dispatched is still of the old length.
                with watchdog.waiting():
                    reporter.flush()
                with pace.paused(), watchdog.phase():
                    current = config.at_context(config.context_at(step - 1))
                    compiled = compile_train_step(current, layout, abstract, len(corpus.names))
                    pace.change_flops(training_flops(config.model, current.data.window))
                    logger.info(f'step {step:>7}  sequences of {current.data.window} tokens from here on')
            asked = time.perf_counter()
            batch = next(batches)
            data_wait = time.perf_counter() - asked
            if fetcher:
                # What earlier steps read may make room.
                fetcher.advance(step - 1)
            first = step == start + 1
            # Dispatch may wait for other processes too. The first step connects them, which may take long.
            with watchdog.phase() if first else watchdog.waiting():
                # Only the batch moves to the device, and by an explicit transfer; a hidden one would stall every step.
                with jax.transfer_guard('disallow'):
                    state, metrics = compiled.step(state, layout.put_batch(batch, current.train.global_batch))
                if first:
                    jax.block_until_ready(metrics)
            with watchdog.waiting():
                reporter.submit(step, metrics, data_wait)
            watchdog.step_done()

            diverged = reporter.skipped_in_a_row >= config.train.max_skipped_steps
            last = step == num_steps or stop.reached(step) or diverged
            save = last or _due(step, config.checkpoint.every_steps, num_steps)
            # Who is told to stop has little time: then the state is saved and nothing else is done.
            validate = _due(step, config.eval.every, num_steps) and (not last or step == num_steps)
            if save or validate:
                # Waits for the step here, where the wait still counts as the step's own time.
                with watchdog.waiting():
                    reporter.flush()
            with pace.paused(), watchdog.phase():
                if save:
                    checkpoints.save(step, state, facts)
                if validate and validate_on:
                    reporter.evaluated(step, validate_on(evaluated_params(state)))
            if last:
                break
        watchdog.finish()

    if reporter.skipped_in_a_row >= config.train.max_skipped_steps:
        logger.error(
            f'stopped at step {step}: {reporter.skipped_in_a_row} steps in a row had a loss or gradient that is not '
            f'finite (train.max_skipped_steps); try a lower optimizer.learning_rate, and look at the data'
        )
        return EXIT_FAILED
    if step < num_steps:
        logger.info(f'{stop.requested}: step {step} of {num_steps} is saved; start again to go on')
        return EXIT_PREEMPTED
    _log_summary(config, corpus, reporter, pace, time.perf_counter() - started)
    return EXIT_DONE


def _due(step: int, every: int, num_steps: int) -> bool:
    return every > 0 and (step % every == 0 or step == num_steps)


def _make_validation(config: Config, corpus: Corpus, layout: Layout, rows: slice) -> Callable[[Any], Evaluation]:
    global_batch = config.train.global_batch
    batches = corpus.validation_batches(global_batch, config.eval.num_batches, rows)
    # Every process reads all of the sums.
    eval_step = jax.jit(make_eval_step(config, layout, len(corpus.names)), out_shardings=layout.named())

    def validate_on(params: Any) -> Evaluation:
        in_order = (batches[index] for index in range(len(batches)))
        return evaluate(eval_step, params, in_order, layout=layout, global_batch=global_batch)

    return validate_on


def _log_start(config: Config, abstract: TrainState, forecast: Forecast) -> Peak:
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


def _log_summary(config: Config, corpus: Corpus, reporter: Reporter, pace: Pace, seconds: float) -> None:
    perf = pace.read_total()
    mfu = (
        f', MFU {perf["perf/mfu"]:.1%} counted causally ({perf["perf/mfu_full"]:.1%} with full attention)'
        if 'perf/mfu' in perf
        else ''
    )
    logger.info(
        f'done: {config.train.num_steps} steps in {datetime.timedelta(seconds=round(seconds))}, '
        f'{perf["perf/tokens_per_second"]:,.0f} tokens/s{mfu}'
    )
    validation = reporter.validation_loss
    validation_text = '' if validation is None else f'; validation loss {validation:.3f}'
    logger.info(
        f'training loss {reporter.last_loss:.3f}{validation_text} nats/token; '
        f'unigram entropy of the validation data {corpus.unigram_entropy:.3f}'
    )


def run() -> None:
    """Entry of `python -m maxlm.train` and `maxlm train`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
