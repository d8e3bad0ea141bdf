"""Data and arguments for small SFT, DPO, KTO and GRPO runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from maxlm.data.tokenizer.tokenizer import chars_tokenizer
from maxlm.errors import EXIT_DONE
from tests.cli.runs.test_train import SMALL
from tests.conftest import ROOT
from tests.preparing import run as prepare
from tests.starting import MODEL, make_start

CONFIG = f'--config={ROOT}/configs/tiny.py'
WINDOW = 64
PREFERENCES = {
    'train.objective': 'dpo',
    'train.num_steps': 12,
    'train.global_batch_size': 16,
    'train.log_every': 1,
    'data.seq_len': WINDOW,
    'model.dropout': 0.0,
    'eval.interval': 6,
    'eval.num_batches': 0,
    'eval.num_samples': 1,
    'eval.sample_max_tokens': 4,
    'optimizer.learning_rate': 0.01,
    'optimizer.warmup_steps': 0,
    'checkpoint.save_interval_steps': 6,
    'checkpoint.max_to_keep': 5,
}
# The reward favors short responses, which a random model learns quickly by emitting the end token.
REINFORCEMENT = {
    'train.objective': 'grpo',
    'train.num_steps': 8,
    'train.global_batch_size': 16,
    'train.log_every': 1,
    'grpo.reward': 'length',
    'grpo.num_generations': 8,
    'grpo.prompts_per_rollout': 4,
    'grpo.max_completion_length': 12,
    'grpo.eval_num_generations': 2,
    'eval.interval': 4,
    'eval.num_samples': 1,
    'model.dropout': 0.0,
    'optimizer.learning_rate': 0.05,
    'optimizer.warmup_steps': 0,
    'optimizer.schedule': 'constant',
    'checkpoint.save_interval_steps': 2,
    'guard.spike_window': 0,
    'guard.max_rollbacks': 0,
}


def make_preferences(directory: Path, pairs: int = 400) -> None:
    """Writes `data`, pairs in which the answer with fewer z is preferred, and the initial model `sft`."""
    rng = random.Random(0)
    lines = []
    for _ in range(pairs):
        prompt, chosen, rejected = (''.join(rng.choices(letters, k=3)) for letters in ('abc', 'abcxy', 'abcz'))
        lines.append(json.dumps({'prompt': prompt, 'chosen': chosen, 'rejected': f'z{rejected}'}))
    _prepare_preferences(directory / 'pairs.jsonl', lines, directory / 'data')
    make_start(directory / 'sft', directory / 'data/tokenizer.json')


def make_labels(directory: Path) -> None:
    """Writes `labels`, the answers of `make_preferences` with labels, in random order."""
    lines = []
    for line in (directory / 'pairs.jsonl').read_text().splitlines():
        pair = json.loads(line)
        for answer, label in (('chosen', True), ('rejected', False)):
            lines.append(json.dumps({'prompt': pair['prompt'], 'completion': pair[answer], 'label': label}))
    random.Random(1).shuffle(lines)
    _prepare_preferences(directory / 'labels.jsonl', lines, directory / 'labels')


def _prepare_preferences(path: Path, lines: list[str], output: Path) -> None:
    path.write_text('\n'.join(lines))
    flags = ['--format=preference', '--tokenizer=bytes', f'--pack-seq-len={WINDOW}', '--validation-fraction=0.2']
    assert prepare('--input', path, '--output', output, *flags) == EXIT_DONE


def make_chats(directory: Path, tokenizer: Path) -> None:
    """Writes `chats`, single-turn conversations."""
    turns = [[{'role': 'user', 'content': f'say {n}'}, {'role': 'assistant', 'content': str(n)}] for n in range(300)]
    (directory / 'chats.jsonl').write_text('\n'.join(json.dumps({'messages': messages}) for messages in turns))
    flags = ['--format=chat', f'--tokenizer={tokenizer}', f'--pack-seq-len={WINDOW}', '--validation-fraction=0.2']
    assert prepare('--input', directory / 'chats.jsonl', '--output', directory / 'chats', *flags) == EXIT_DONE


def make_prompts(directory: Path) -> None:
    """Writes `prompts.jsonl`, `held_out.jsonl` and the initial model `sft`."""
    chars_tokenizer(['abcdefghxyz']).save(directory / 'tokenizer.json')
    make_start(directory / 'sft', directory / 'tokenizer.json', vocab_size=16)
    for name, texts in {'prompts': 'abcdefgh', 'held_out': 'xyz'}.items():
        lines = [json.dumps({'prompt': f'ab{text}', 'target_length': 3}) for text in texts]
        (directory / f'{name}.jsonl').write_text('\n'.join(lines))


def preference_arguments(start: Path, **overrides: Any) -> list[str]:
    """Returns arguments of `maxlm train` for DPO with the pairs in `start`."""
    return _arguments({'data.path': start / 'data', 'train.init_from': start / 'sft', **PREFERENCES}, overrides)


def grpo_arguments(start: Path, **overrides: Any) -> list[str]:
    """Returns arguments of `maxlm grpo` for the prompts in `start`."""
    settings = {
        'model.vocab_size': 16,
        'data.seq_len': 24,
        'train.init_from': start / 'sft',
        'grpo.prompts': start / 'prompts.jsonl',
        'grpo.eval_prompts': start / 'held_out.jsonl',
        **REINFORCEMENT,
    }
    return _arguments(settings, overrides)


def _arguments(settings: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
    settings = {
        **{key: value for key, value in SMALL.items() if key.startswith('metrics')},
        **{key.replace('__', '.'): value for key, value in MODEL.items()},
        **settings,
        **{key.replace('__', '.'): value for key, value in overrides.items()},
    }
    return [CONFIG, *(f'--config.{key}={value}' for key, value in settings.items())]
