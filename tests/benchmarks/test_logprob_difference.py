"""Tests the measurement of log-probabilities of sampling and training."""

import json

from benchmarks import logprob_difference
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from tests.serving.fake_engine import chat_tokenizer
from tests.starting import make_start


def test_a_tiny_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '')  # one device
    chat_tokenizer().save(tmp_path / 'tokenizer.json')
    make_start(tmp_path / 'run', tmp_path / 'tokenizer.json', model__max_positions=256, model__init_std=0.3)
    output = tmp_path / 'found.json'
    arguments = [f'tiny={tmp_path / "run"}', '--dtypes=bfloat16', f'--output={output}']
    assert exit_code(logprob_difference.main, arguments) == EXIT_DONE
    found = json.loads(output.read_text())
    assert found['machine']['jax']
    # Rounding to bfloat16 differs, but neither is the wrong token.
    assert 0 < found['results']['tiny']['bfloat16']['logprob_difference'] < 0.5
    assert 'tiny' in capsys.readouterr().out


def test_errors_name_the_checkpoint(tmp_path, capfd):
    assert exit_code(logprob_difference.main, [str(tmp_path)]) == EXIT_BAD_INPUT
    assert 'must be NAME=CHECKPOINT' in capfd.readouterr().err
    assert exit_code(logprob_difference.main, [f'none={tmp_path / "none"}']) == EXIT_BAD_INPUT
    *_, cause, last = capfd.readouterr().err.splitlines()
    assert cause.startswith('error: ')
    assert last.endswith('none: maxlm grpo ended with code 2; correct the error above')
