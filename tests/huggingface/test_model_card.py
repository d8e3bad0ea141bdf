"""Tests the model card: the properties of the run, no paths, reproducible text."""

import json
from pathlib import Path

import pytest

from maxlm.errors import InputError
from maxlm.huggingface.config_conversion import choose_architecture
from maxlm.huggingface.model_card import model_card
from tests.small import small_config


def card(workdir, *, step=0, architecture='auto', **overrides):
    config = small_config(**overrides)
    row = choose_architecture(config.model, architecture)
    return model_card(
        'tiny', workdir=workdir, step=step, config=config, architecture=row, dtype='bfloat16', parameters=1_234_567
    )


def test_a_card_of_a_run(tmp_path):
    lines = [
        {'step': 10, 'train/loss': 5.0},
        {'step': 20, 'train/loss': 3.5, 'eval/loss': 3.25},
        {'step': 30, 'train/loss': 4.0},
        {'step': 30, 'train/loss': None, 'eval/loss': 3.75},
        {'step': 40, 'train/loss': 1.0, 'eval/loss': 1.0},
    ]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (tmp_path / 'tokenizer.json').write_text('{}')
    secret = '/home/someone/secret'
    text = card(
        tmp_path,
        step=30,
        model__family='llama',
        data__path=f'{secret}/books',
        train__init_from=f'{secret}/older@5',
    )
    for part in (
        '---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- maxlm\n- jax\n- llama\n---\n',
        '# tiny\n',
        '1.23M parameters, trained with maxlm',
        '`LlamaForCausalLM`',
        "AutoModelForCausalLM.from_pretrained('tiny')",
        "AutoTokenizer.from_pretrained('tiny')",
        'vllm serve tiny',
        '| parameters | 1,234,567 |',
        '| weights | bfloat16 |',
        '| positions | rotary, base 10,000 |',
        '| data | books |',
        '| steps | 30 |',
        # 30 steps of 8 · 16 tokens.
        '| tokens seen | 3,840 |',
        '| training loss | 4.0000 nats/token (last), 3.5000 (lowest) |',
        '| validation loss | 3.7500 nats/token (last), 3.2500 (lowest) |',
        '| started from | older@5 |',
        '"path": "books"',
        '<details>',
    ):
        assert part in text, part
    assert secret not in text
    assert str(tmp_path) not in text
    # The front matter is closed, and the config is valid JSON without defaults.
    settings = json.loads(text.partition('```json\n')[2].partition('```')[0])
    assert settings['model']['family'] == 'llama'
    assert 'dropout' not in settings['model']
    assert 'dpo' not in settings


def test_a_card_of_a_mixture(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 10, "train/loss": 5.0}\n')
    sources = (('/home/someone/web', 3.0), ('/home/someone/code#python', 1.0))
    text = card(tmp_path, step=10, data__sources=sources, data__cache_dir='/home/someone/cache')
    assert '| data | 75.0% web, 25.0% code#python |' in text
    assert '/home/someone' not in text


def test_a_card_without_a_run(tmp_path):
    text = card(tmp_path, model__family='gpt2')
    assert 'contains no training run' in text
    assert '## Training' not in text
    assert '```json' not in text
    assert 'base_model' not in text
    assert 'AutoTokenizer.from_pretrained' not in text
    assert ', tied to the output' in text


def test_only_transformers_runs_nanochat(tmp_path):
    text = card(tmp_path, architecture='nanochat', model__family='nanochat')
    assert 'vllm' not in text
    assert 'Transformers 5' in text


def test_attention(tmp_path):
    window = {'model__family': 'qwen3', 'model__sliding_window': 8}
    assert '| attention | full context |' in card(tmp_path, model__family='qwen3')
    assert '| attention | the last 8 tokens |' in card(tmp_path, model__attention_pattern='S', **window)
    assert 'SL over the layers: S the last 8' in card(tmp_path, model__attention_pattern='SL', **window)
    nope = card(tmp_path, model__family='smollm3', model__attention_pattern='LN')
    assert 'LN over the layers: L full context, N full context without rotary positions |' in nope


def test_the_tokens_of_an_available_data_set(dataset, tmp_path):
    (tmp_path / 'tokenizer.json').write_bytes((dataset / 'tokenizer.json').read_bytes())
    tokens = json.loads((dataset / 'dataset.json').read_text())['splits']['train']['tokens']
    text = card(tmp_path, step=1, data__path=str(dataset))
    assert f'| data | license, {tokens:,} tokens |' in text
    # With another tokenizer, the directory now contains other data.
    changed = (dataset / 'tokenizer.json').read_text().replace('"!"', '"µ"', 1)
    (tmp_path / 'tokenizer.json').write_text(changed)
    assert '| data | license |' in card(tmp_path, step=1, data__path=str(dataset))


def test_a_card_does_not_depend_on_directory_or_date(tmp_path):
    for name in ('a', 'b'):
        (tmp_path / name).mkdir()
    assert card(tmp_path / 'a', step=1) == card(tmp_path / 'b', step=1)
    assert card(tmp_path / 'a', step=1) != card(tmp_path / 'a', step=2)


def test_damaged_metrics(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\nno\n')
    with pytest.raises(InputError, match=r'metrics\.jsonl'):
        card(Path(tmp_path), step=1)
