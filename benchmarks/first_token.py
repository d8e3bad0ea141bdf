"""Losses with and without training of first tokens: `python -m benchmarks.first_token --workdirs=DIR [--output=FILE]`.

The documents are the functions of Python's standard library, of which one in twenty is held out. Two runs of the same
small model differ only in `data.train_first_token`. The held-out documents are scored like `Model.loss`, after an
end-of-document token, and, except for their first token, without it, like a prompt. Runs on a CPU; takes about ten
minutes on two cores.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runs import EXCLUDED, call
from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.inference.load import load_model
from maxlm.inference.scoring import LogprobScorer, ScoringRequest

STEPS, HELD_OUT_EVERY, MAX_BYTES = 300, 20, 2000
MODEL = {
    'model.num_layers': 3,
    'model.dim': 128,
    'model.num_heads': 4,
    'model.ffn_dim': 352,
    'data.seq_len': 256,
    'train.num_steps': STEPS,
    'train.global_batch_size': 16,
    'eval.interval': 0,
    'eval.num_samples': 0,
}


def main(argv: list[str]) -> int:
    """Trains both models, and prints and writes their losses."""
    parser = ArgumentParser(prog='benchmarks.first_token', allow_abbrev=False, description=__doc__)
    parser.add_argument('--workdirs', type=Path, required=True, help='directory of the data set and runs')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    held_out = prepare(options.workdirs)
    results = {}
    for trains in (False, True):
        workdir = options.workdirs / f'first-{trains}'
        overrides = {**MODEL, 'data.path': options.workdirs / 'data', 'data.train_first_token': trains}
        words = [f'--config.{key}={value}' for key, value in overrides.items()]
        call('maxlm.train', '--config=configs/tiny.py', f'--workdir={workdir}', *words)
        results[f'train_first_token={trains}'] = losses(workdir, held_out)
    print(json.dumps(results, indent=1))
    if options.output:
        facts = {'machine': machine(), 'documents': len(held_out), 'steps': STEPS, 'model': MODEL}
        options.output.write_text(json.dumps({**facts, 'nats_per_token': results}, indent=1) + '\n')
    return EXIT_DONE


def prepare(directory: Path) -> list[str]:
    """Writes the data set of the training documents, and returns the held-out documents."""
    documents = list(functions(Path(sysconfig.get_path('stdlib'))))
    directory.mkdir(parents=True, exist_ok=True)
    texts = directory / 'functions.jsonl'
    training = [text for place, text in enumerate(documents) if place % HELD_OUT_EVERY]
    texts.write_text(''.join(json.dumps({'text': text}) + '\n' for text in training))
    output = ['--output', str(directory / 'data'), '--tokenizer=bpe:1024', '--validation-fraction=0', '--quiet']
    call('maxlm.prepare', '--input', str(texts), *output)
    return documents[::HELD_OUT_EVERY]


def functions(directory: Path) -> Iterator[str]:
    """Yields the source of each top-level function and class of a directory, up to a size, in a fixed order."""
    for path in sorted(directory.rglob('*.py')):
        if set(path.relative_to(directory).parts) & set(EXCLUDED):
            continue
        try:
            source = path.read_text(encoding='utf-8')
            nodes = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            text = ast.get_source_segment(source, node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
            if text and len(text) < MAX_BYTES:
                yield text


def losses(workdir: Path, documents: list[str]) -> dict[str, float]:
    """Returns means in nats per token: of first tokens, of all tokens, and of all but the first without a prefix."""
    model = load_model(str(workdir), num_devices=1)
    scorer, ids = LogprobScorer(model), encode(model.tokenizer, documents, limit=MODEL['data.seq_len'])
    end = [model.tokenizer.end_of_document]
    requests = {
        'first token': [ScoringRequest(end, one[:1]) for one in ids],
        'all tokens': [ScoringRequest(end, one) for one in ids],
        'without prefix': [ScoringRequest(one[:1], one[1:]) for one in ids],
    }
    return {
        name: -sum(score.log_prob for score in scorer.score(group)) / sum(len(one.continuation) for one in group)
        for name, group in requests.items()
    }


def encode(tokenizer: Tokenizer, documents: list[str], *, limit: Any) -> list[list[int]]:
    """Returns the ids of the documents of 2 to `limit` - 1 tokens."""
    encoded: list[np.ndarray] = tokenizer.encode_batch(documents)
    return [ids.tolist() for ids in encoded if 2 <= len(ids) < limit]


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
