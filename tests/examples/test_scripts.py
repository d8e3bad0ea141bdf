"""The scripts of examples/ run with small models, and their results are plausible."""

import json
import re

import numpy as np
import pytest

import maxlm
from examples import chat_model, choose_hardware, learning_rates, own_loop, train_on_text
from tests.cli.runs.test_train import SMALL
from tests.conftest import ROOT

SMALLER = {**SMALL, 'data.seq_len': 96}


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    """Makes the models of the config `tiny`, and the sequences of `finetune`, smaller."""
    original = maxlm.Config.get.__func__

    def get(cls, name, overrides=None):
        small = {}
        if name == 'tiny':
            small = {key: value for key, value in SMALLER.items() if key != 'train.num_steps'}
        elif name == 'finetune':
            small = {'data.seq_len': SMALLER['data.seq_len'], 'eval.num_batches': 1}
        return original(cls, name, {**small, **(overrides or {})})

    monkeypatch.setattr(maxlm.Config, 'get', classmethod(get))


def test_a_model_is_trained_on_text_and_learns_to_chat(tmp_path, capsys):
    (tmp_path / 'texts').mkdir()
    for number in range(60):
        (tmp_path / f'texts/{number}.txt').write_text(f'The text number {number}.\n' * 20)
    base = tmp_path / 'base'
    run = train_on_text.main(
        [str(tmp_path / 'texts'), f'--workdir={base}', '--tokens=6000', '--tokenizer=bytes', '--prompt=The te']
    )
    assert run.outcome == 'finished'
    assert 'The te' in capsys.readouterr().out
    chat = {'messages': [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]}
    (tmp_path / 'chats.jsonl').write_text(f'{json.dumps(chat)}\n' * 200)
    arguments = [str(base), str(tmp_path / 'chats.jsonl'), f'--workdir={tmp_path}/chat', '--epochs=1']
    assert isinstance(chat_model.main(arguments), str)
    assert maxlm.Run(tmp_path / 'chat').config.train.init_from == str(base)


def test_learning_rates_are_compared(dataset, tmp_path, capsys):
    output = tmp_path / 'plot.png'
    options = [f'--workdir={tmp_path}/runs', '--steps=20', f'--output={output}']
    runs = learning_rates.main([str(dataset), '1e-2', '1e-9', *options])
    # A rate of 1e-9 learns nothing.
    assert [run.outcome for run in runs.values()] == ['finished', 'preempted']
    assert runs[1e-9].summary['step'] < 20
    assert re.search(r'1e-09 +preempted', capsys.readouterr().out)
    assert output.read_bytes().startswith(b'\x89PNG')


def test_hardware_is_compared(capsys):
    plans = choose_hardware.main(['1b', 'h100:8', 'h100:1', 'abc:8'])
    assert {plan.target.spec for plan in plans} == {'h100:8', 'h100:1'}
    assert plans[0].fits
    shown = capsys.readouterr().out
    assert 'abc:8: ' in shown
    assert re.search(r'h100:8 +\d+\.\d GiB +\d+%', shown)


def test_an_own_loop_trains_and_resumes(dataset, tmp_path):
    losses = own_loop.main([str(dataset), str(tmp_path / 'whole'), '--steps=6', '--save-every=3'])
    assert len(losses) == 6
    assert np.isfinite(losses).all()
    # The checkpoint of step 3 continues with the same losses.
    (tmp_path / 'half').mkdir()
    (tmp_path / 'whole/3').rename(tmp_path / 'half/3')
    assert own_loop.main([str(dataset), str(tmp_path / 'half'), '--steps=6', '--save-every=3']) == losses[3:]


def test_the_documentation_names_each_script():
    page = (ROOT / 'docs/python.md').read_text()
    scripts = {path.name for path in (ROOT / 'examples').glob('*.py')} - {'__init__.py'}
    assert len(scripts) == 9
    assert {name for name in scripts if f'examples/{name}' not in page} == set()
