"""Measures how far log-probabilities of the sampler and of the training step differ for the same parameters.

    python -m benchmarks.logprob_difference NAME=CHECKPOINT [NAME=CHECKPOINT …] [--output=FILE]

Each checkpoint is a workdir, with or without a chat template. `maxlm grpo` samples 32 answers of at most 128 tokens and
takes one step, whose `train/logprob_difference` is the largest difference of a token. `train/approx_kl` estimates the
KL divergence of both distributions. Prints a table, and writes JSON with machine and versions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.telemetry.metrics import read_metrics

PROMPTS = ('a lighthouse', 'the number seven', 'how bread is made', 'a sorting algorithm')
GENERATIONS, TOKENS, SEQ_LEN = 8, 128, 256
COLUMNS = {'logprob_difference': 'train/logprob_difference', 'approx_kl': 'train/approx_kl'}


def main(argv: list[str]) -> int:
    """Measures all checkpoints with all dtypes."""
    parser = ArgumentParser(prog='benchmarks.logprob_difference', allow_abbrev=False, description=__doc__)
    parser.add_argument('checkpoints', nargs='+', metavar='NAME=CHECKPOINT')
    parser.add_argument('--dtypes', default='float32,bfloat16', help='values of model.dtype (default: both)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for argument in options.checkpoints:
        name, separator, checkpoint = argument.partition('=')
        if not separator:
            raise InputError(f'{argument}: must be NAME=CHECKPOINT; name the checkpoint, for example small={argument}')
        for dtype in options.dtypes.split(','):
            found = measure(Path(checkpoint), dtype)
            results.setdefault(name, {})[dtype] = found
            print(f'{name:<16} {dtype:<10}', *(f'{key} {value:.3g}' for key, value in found.items()), flush=True)
            if options.output:
                text = json.dumps({'machine': machine(), 'results': results}, indent=1)
                options.output.write_text(f'{text}\n')
    return EXIT_DONE


def measure(checkpoint: Path, dtype: str) -> dict[str, float]:
    """Returns the metrics of the first step on answers of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, workdir = Path(folder, 'prompts.jsonl'), Path(folder, 'run')
        prompts.write_text(
            '\n'.join(json.dumps({'prompt': f'Write about {text}.', 'target_length': TOKENS}) for text in PROMPTS)
        )
        settings = {
            'model.dtype': dtype,
            'data.seq_len': SEQ_LEN,
            'train.objective': 'grpo',
            'train.init_from': checkpoint.resolve(),
            'train.num_steps': 1,
            'train.log_every': 1,
            'train.global_batch_size': len(PROMPTS) * GENERATIONS,
            'grpo.prompts': prompts,
            'grpo.reward': 'length',
            'grpo.num_generations': GENERATIONS,
            'grpo.prompts_per_rollout': len(PROMPTS),
            'grpo.max_completion_length': TOKENS,
            'optimizer.warmup_steps': 0,
        }
        config = f'--config={checkpoint / "config.json"}'
        command = [sys.executable, '-m', 'maxlm', 'grpo', config, f'--workdir={workdir}']
        command += [f'--config.{key}={value}' for key, value in settings.items()]
        code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        if code != EXIT_DONE:
            raise InputError(f'{checkpoint}: maxlm grpo ended with code {code}; correct the error above')
        rows: list[dict[str, Any]] = [row for row in read_metrics(workdir) if COLUMNS['logprob_difference'] in row]
    return {key: rows[0][column] for key, column in COLUMNS.items()}


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
