"""Finds the cause of jumps of the loss: the parameters, the batch or a wrong computation.

    python -m benchmarks.gpu_decide --config=configs/1b.py [--config.section.key=value …] [--output=FILE]

Trains on the text of this repository and watches for a loss far above those of the steps before. At such a jump the
loss is computed again with the same parameters: many times on the same batch, on other batches, and with another
attention kernel. The last step, without a jump, is examined as a control. Prints the losses, writes JSON, and exits
with 1 if a computation was wrong. Needs only jax, flax, optax and ml_collections.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.step import machine, resolve_here
from benchmarks.text_steps import text_batches
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.schema import Config
from maxlm.config.sections.model import AttentionKernel
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.parallel.layout import make_layout
from maxlm.runtime.malloc import disable_malloc_trim
from maxlm.training.batch import Batch
from maxlm.training.compile import compile_train_step, device_options
from maxlm.training.state import Params, TrainState, abstract_state, init_state
from maxlm.training.step import make_eval_step

# Steps whose median loss is compared with the next one, and steps before the first comparison.
WINDOW, FIRST = 8, 12
# Number of jumps that are examined.
MOST = 4
WRONG = ('training step', 'repetition', 'attention kernel')

# Loss of a batch with given parameters.
Evaluate = Callable[[Params, Batch], float]


def main(argv: list[str]) -> int:
    """Trains, examines jumps, and prints and writes the results."""
    overrides, rest = split_overrides(argv)
    parser = ArgumentParser(prog='benchmarks.gpu_decide', allow_abbrev=False, description=__doc__)
    parser.add_argument('--config', required=True, help='config file, with a variant after a colon')
    parser.add_argument('--steps', type=int, default=80, help='training steps (default 80)')
    parser.add_argument('--repeats', type=int, default=100, help='repetitions of an examined batch (default 100)')
    parser.add_argument('--jump', type=float, default=0.15, help='smallest jump in nats (default 0.15)')
    parser.add_argument('--other-attention', default='xla', help='attention kernel to compare with (default xla)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(rest)
    if options.steps <= FIRST or options.repeats < 2:
        raise InputError(f'--steps must be above {FIRST} and --repeats at least 2')
    config = resolve_here(options.config, overrides)
    found = run(
        config, steps=options.steps, repeats=options.repeats, jump=options.jump, other_attention=options.other_attention
    )
    result = {'name': options.config, 'overrides': overrides, **found, 'machine': machine()}
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    causes = [jump['cause'] for jump in found['jumps']]
    print(f'{len(causes)} jumps of the loss: {", ".join(causes)}' if causes else 'no jump of the loss')
    return EXIT_FAILED if set(causes) & set(WRONG) or found['control']['different_values'] > 1 else EXIT_DONE


def run(config: Config, *, steps: int, repeats: int, jump: float, other_attention: AttentionKernel) -> dict[str, Any]:
    """Trains a resolved config and examines the steps whose loss is `jump` above the median of those before.

    Returns:
        The loss, gradient norm and `skipped` of each step; the examined jumps with their causes (see `cause_of`); and
        the examined last step.
    """
    layout = make_layout(config.mesh)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    state = init_state(config, layout)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=other_attention))
    evaluate, with_other = (_evaluation(each, state) for each in (config, other))
    copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
    # One more batch than steps, because the examination of the last step needs the next batch.
    batches = text_batches(config, layout, steps + 1)

    def examine(params: Params, number: int) -> dict[str, Any]:
        again = [evaluate(params, batches[number]) for _ in range(repeats)]
        return {
            'step': number,
            **log[number],
            'usual': _usual(log, number),
            'same_batch': [min(again), max(again)],
            'different_values': len(set(again)),
            'other_batches': [evaluate(params, batches[index]) for index in (0, number - 1, number + 1)],
            'other_attention': with_other(params, batches[number]),
        }

    log: list[dict[str, Any]] = []
    jumps: list[dict[str, Any]] = []
    for number in range(steps):
        before = copy(state.params)
        state, metrics = step(state, batches[number])
        values = jax.device_get(metrics)
        log.append({name: values[name].item() for name in ('loss', 'grad_norm', 'skipped')})
        loss = log[-1]['loss']
        print(f'{number} loss {loss:.4f} gradient norm {log[-1]["grad_norm"]:.3f}', flush=True)
        # The negated comparison also catches NaN.
        if number >= FIRST and len(jumps) < MOST and not loss <= _usual(log, number) + jump:
            examined = examine(before, number)
            jumps.append({**examined, 'cause': cause_of(examined)})
            print(json.dumps(jumps[-1]), flush=True)
    return {'steps': log, 'jumps': jumps, 'control': examine(before, steps - 1)}


def cause_of(examined: dict[str, Any]) -> str:
    """Returns the cause of a jump of the loss: `batch`, `parameters` or a wrong computation (see WRONG).

    A loss counts as high if it is nearer to the recorded loss than to the usual one.
    """
    middle = (examined['loss'] + examined['usual']) / 2

    def is_high(loss: float) -> bool:
        # The negated comparison also catches NaN.
        return not loss < middle

    lowest, highest = map(is_high, examined['same_batch'])
    if lowest != highest:
        return 'repetition'
    if not highest:
        return 'training step'
    if not is_high(examined['other_attention']):
        return 'attention kernel'
    return 'parameters' if is_high(statistics.median(examined['other_batches'])) else 'batch'


def _usual(log: Sequence[dict[str, Any]], number: int) -> float:
    """Returns the median loss of the steps before a step."""
    return statistics.median(values['loss'] for values in log[number - WINDOW : number])


def _evaluation(config: Config, state: TrainState) -> Evaluate:
    options = device_options(jax.local_devices()[0])
    sums_of = jax.jit(make_eval_step(config, make_layout(config.mesh)), compiler_options=options)

    def evaluate(params: Params, batch: Batch) -> float:
        sums = sums_of(params, state.reference, batch)
        return float(sums.loss) / float(sums.weight)

    return evaluate


if __name__ == '__main__':
    # `maxlm train` does this too.
    disable_malloc_trim()
    sys.exit(exit_code(main, sys.argv[1:]))
