"""Writes the model card: the README.md of an export, with properties of the run and loading instructions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import maxlm
from maxlm.config.schema import MODELS, AlertsConfig, Config, ModelConfig
from maxlm.config.serialization import as_dict
from maxlm.data.dataset.records import load_manifest
from maxlm.data.tokenizer.text_boundaries import describe_boundaries
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.formatting import format_si
from maxlm.huggingface.architectures.architecture import NANOCHAT, Architecture
from maxlm.huggingface.architectures.reward_models import class_name_of
from maxlm.telemetry.metrics import read_metrics
from maxlm.workdir.files import TOKENIZER

NAME = 'README.md'


def model_card(
    name: str,
    *,
    workdir: Path,
    step: int,
    config: Config,
    architecture: Architecture,
    dtype: str,
    parameters: int,
    base: str = '',
) -> str:
    """Returns the text of the card. It contains only the last component of paths, and does not depend on the date.

    Args:
        name: name of the model.
        workdir, step, config: the run and its exported step.
        architecture, dtype: architecture and type of the export.
        parameters: number of parameters.
        base: name of the imported model on the Hugging Face Hub; '' = unknown or none.

    Raises:
        InputError: metrics.jsonl is corrupt.
    """
    kind = 'reward' if config.model.reward_head else 'language'
    class_name = class_name_of(architecture, config.model)
    parts = [
        _front_matter(architecture, config.model, base),
        f'# {name}\n',
        f'A {kind} model of {format_si(parameters)} parameters, trained with maxlm {maxlm.__version__} and exported '
        f'for Transformers as `{class_name}`.\n'
        if step
        else f'A {kind} model of {format_si(parameters)} parameters, exported from maxlm {maxlm.__version__} for '
        f'Transformers as `{class_name}`; its workdir contains no training run.\n',
        '## Use\n',
        _reward_usage(name)
        if config.model.reward_head
        else _usage(name, architecture, (workdir / TOKENIZER).is_file()),
        '## Model\n',
        _table(
            {'parameters': f'{parameters:,}', 'weights': dtype, **_model_rows(config.model), **_token_rows(workdir)}
        ),
    ]
    if step:
        parts += [
            '## Training\n',
            _table(_training_rows(workdir, step, config)),
            '<details><summary>Settings that differ from the defaults</summary>\n',
            f'```json\n{json.dumps(_changed_settings(config), indent=2)}\n```\n',
            '</details>',
        ]
    return '\n'.join(parts) + '\n'


def _front_matter(architecture: Architecture, model: ModelConfig, base: str) -> str:
    task = 'text-classification' if model.reward_head else 'text-generation'
    based_on = f'base_model: {base}\n' if base else ''
    tags = ''.join(f'- {tag}\n' for tag in ('maxlm', 'jax', architecture.model_type))
    return f'---\nlibrary_name: transformers\npipeline_tag: {task}\n{based_on}tags:\n{tags}---\n'


def _usage(name: str, architecture: Architecture, has_tokenizer: bool) -> str:
    lines = ['```python', 'from transformers import AutoModelForCausalLM, AutoTokenizer', '']
    lines += [f"model = AutoModelForCausalLM.from_pretrained('{name}')"]
    if has_tokenizer:
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained('{name}')",
            "inputs = tokenizer('Once upon a time', return_tensors='pt')",
            'print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))',
        ]
    lines += ['```', '']
    if architecture is NANOCHAT:
        return '\n'.join([*lines, 'It requires Transformers 5 or later.', ''])
    return '\n'.join([*lines, 'With vLLM:', '', '```', f'vllm serve {name}', '```', ''])


def _reward_usage(name: str) -> str:
    lines = [
        '```python',
        'from transformers import AutoModelForSequenceClassification, AutoTokenizer',
        '',
        f"model = AutoModelForSequenceClassification.from_pretrained('{name}')",
        f"tokenizer = AutoTokenizer.from_pretrained('{name}')",
        "messages = [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hello!'}]",
        "inputs = tokenizer.apply_chat_template(messages, return_tensors='pt', return_dict=True)",
        'print(model(**inputs).logits[0, 0])',
        '```',
        '',
        'The higher of the scores of two answers to the same prompt is that of the preferred answer.',
        '',
    ]
    return '\n'.join(lines)


def _model_rows(model: ModelConfig) -> dict[str, str]:
    positions: str = model.position_embedding
    if model.position_embedding == 'rotary':
        positions += f', base {model.rope_theta:,.0f}'
        if model.partial_rotary_factor < 1:
            positions += f', {model.partial_rotary_factor:.0%} of each head'
        if model.rope_scaling != 'none':
            positions += f', {model.rope_scaling} scaling by {model.rope_scaling_factor:g}'
    ranges = {
        'S': f'the last {model.sliding_window:,} tokens',
        'L': 'full context',
        'N': 'full context without rotary positions',
    }
    used = {kind: text for kind, text in ranges.items() if kind in model.attention_pattern}
    attention = next(iter(used.values()))
    if len(used) > 1:
        listed = ', '.join(f'{kind} {text}' for kind, text in used.items())
        attention = f'{model.attention_pattern} over the layers: {listed}'
    return {
        'layers': str(model.num_layers),
        'hidden size': f'{model.dim:,}',
        'query heads': str(model.num_heads),
        'key/value heads': str(model.num_kv_heads),
        'head dimension': str(model.head_dim),
        'feed-forward': f'{model.ffn_dim:,}, {model.activation}',
        'norm': model.norm + (', also on queries and keys' if model.qk_norm else ''),
        'positions': positions,
        'attention': attention,
        'context': f'{model.max_positions:,} tokens',
        'vocabulary': f'{model.vocab_size:,}' + (', tied to the output layer' if model.tie_embeddings else ''),
    }


def _token_rows(workdir: Path) -> dict[str, str]:
    with contextlib.suppress(InputError):
        return describe_boundaries(Tokenizer.load(workdir / TOKENIZER).boundary_names)
    return {}


def _training_rows(workdir: Path, step: int, config: Config) -> dict[str, str]:
    rows = {
        'data': _training_data(workdir, config),
        'steps': f'{step:,}',
        'tokens seen': f'{step * config.train.global_batch_size * config.data.seq_len:,}',
        'batch': f'{config.train.global_batch_size:,} × {config.data.seq_len:,} tokens',
    }
    if config.train.init_from:
        rows['started from'] = Path(config.train.init_from).name
    lines = [line for line in read_metrics(workdir) if line['step'] <= step]
    for label, key in (('training loss', 'train/loss'), ('validation loss', 'eval/loss')):
        losses = [line[key] for line in lines if line.get(key) is not None]
        if losses:
            rows[label] = f'{losses[-1]:.4f} nats/token (last), {min(losses):.4f} (lowest)'
    return rows


def _training_data(workdir: Path, config: Config) -> str:
    if config.data.sources:
        fractions = zip(config.data.source_fractions, config.data.sources, strict=True)
        return ', '.join(f'{fraction:.1%} {Path(entry).name}' for fraction, (entry, _) in fractions)
    data = Path(config.data.path).name
    with contextlib.suppress(InputError):
        dataset = load_manifest(config.data.path)
        # Another data set may be in the directory now.
        if dataset.tokenizer_sha256 == Tokenizer.load(workdir / TOKENIZER).sha256:
            data += f', {dataset.splits["train"].tokens:,} tokens'
    return data


def _changed_settings(config: Config) -> dict[str, dict[str, object]]:
    """Returns the sections of a config without defaults and without directories of paths."""
    values = as_dict(config)
    # The alert channels are private.
    values['alerts'] = dataclasses.asdict(AlertsConfig())
    values['data']['sources'] = [(Path(entry).name, weight) for entry, weight in config.data.sources]
    paths = (('data', 'path'), ('data', 'cache_dir'), ('train', 'init_from'), ('export', 'to'))
    for section, key in (*paths, ('distill', 'teacher'), ('distill', 'logits_dir'), ('grpo', 'reward_model')):
        values[section][key] = Path(values[section][key]).name
    changed: dict[str, dict[str, object]] = {}
    for section, defaults in dataclasses.asdict(Config()).items():
        # The architecture's keys have no defaults of their own; the table of the model lists them.
        if section not in MODELS:
            found = {key: value for key, value in values[section].items() if value != defaults[key]}
            changed |= {section: found} if found else {}
    return changed


def _table(rows: dict[str, str]) -> str:
    return '\n'.join(['| | |', '|---|---|', *(f'| {name} | {value} |' for name, value in rows.items()), ''])
