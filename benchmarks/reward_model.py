"""Measures a reward model and GRPO with it on this machine: `python -m benchmarks.reward_model [--output FILE]`.

For each seed, runs the commands in the docstring of configs/flags.py. Records the accuracy on held-out pairs during the
training of the reward model, the fraction of green flags during GRPO, and the wall time of each run.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.posttraining import call
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.telemetry.metrics import read_metrics

CONFIG = 'configs/flags.py'


def main(argv: list[str]) -> int:
    """Runs all seeds, and prints and writes the results."""
    parser = ArgumentParser(prog='benchmarks.reward_model', allow_abbrev=False, description=__doc__)
    parser.add_argument('--seeds', type=int, default=3, help='number of seeds (default 3)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    if options.seeds < 1:
        raise InputError(f'--seeds={options.seeds}: needs 1 or more')
    results = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as directory:
            results.append(run(seed, Path(directory)))
        print(line_of(results[-1]), flush=True)
        if options.output:
            options.output.write_text(json.dumps({'machine': machine(), 'results': results}, indent=1) + '\n')
    return EXIT_DONE


def run(seed: int, directory: Path) -> dict[str, Any]:
    """Returns the evaluations by step (0 is the model at the start), the rewards, and the seconds of the runs."""
    data, sft, reward, rl = (directory / name for name in ('data', 'sft', 'reward', 'rl'))
    quiet = ['--config.metrics.tensorboard=False', '--config.metrics.device_stats_interval_seconds=0']
    seeds = [f'--config.train.seed={seed}', f'--config.data.seed={seed}', *quiet]
    call('examples.tasks.flags', '--output', str(data), '--seed', str(seed))
    prepare(data, 'chats', 'chat', 'bytes')
    seconds = {'sft': train('sft', sft, f'--config.data.path={data / "chats"}', *seeds)}
    prepare(data, 'pairs', 'preference', str(sft / 'tokenizer.json'))
    start = f'--config.train.init_from={sft}'
    seconds['reward'] = train('reward', reward, start, f'--config.data.path={data / "pairs"}', *seeds)
    seconds['rl'] = call(
        'maxlm.grpo',
        f'--config={CONFIG}:rl',
        f'--workdir={rl}',
        start,
        f'--config.grpo.reward_model={reward}',
        f'--config.grpo.prompts={data / "prompts.jsonl"}',
        f'--config.grpo.eval_prompts={data / "held_out.jsonl"}',
        *seeds,
    )
    return {
        'seed': seed,
        'seconds': seconds,
        'pairs': values_of(reward, 'eval/rewards/accuracies'),
        'margins': values_of(reward, 'eval/rewards/margins'),
        'rewards': values_of(rl, 'rollout/reward'),
        'greedy': values_of(rl, 'eval/accuracy'),
        'sampled': values_of(rl, 'eval/pass_at_1'),
    }


def prepare(data: Path, name: str, form: str, tokenizer: str) -> None:
    """Prepares a file of the example."""
    files = ['--input', str(data / f'{name}.jsonl'), '--output', str(data / name), f'--tokenizer={tokenizer}']
    settings = ['--chat-template=chatml', '--pack-seq-len=64', '--validation-fraction=0.2']
    call('maxlm.prepare', *files, f'--format={form}', *settings, '--quiet')


def train(variant: str, workdir: Path, *arguments: str) -> float:
    """Trains a variant of the config and returns the seconds."""
    return call('maxlm.train', f'--config={CONFIG}:{variant}', f'--workdir={workdir}', *arguments)


def values_of(workdir: Path, name: str) -> list[tuple[int, float]]:
    """Returns the steps and values of a metric."""
    return [(line['step'], line[name]) for line in read_metrics(workdir) if name in line]


def line_of(result: dict[str, Any]) -> str:
    """Formats a result in one line."""
    first, last = ({name: result[name][place][1] for name in ('pairs', 'greedy', 'sampled')} for place in (0, -1))
    texts = (f'{name} {first[name]:.2f} → {last[name]:.2f}' for name in first)
    return f'seed {result["seed"]}: {", ".join(texts)}; {sum(result["seconds"].values()):.0f} s'


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
