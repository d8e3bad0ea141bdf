"""Configs of tasks with checkable answers: the commands in their docstrings create matching data."""

import json

import pytest

from examples.tasks import __main__ as tasks
from maxlm.cli.setup import prepare
from maxlm.config.loading import load
from maxlm.config.validation_rl import check_grpo
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.dataset.records import load_manifest
from maxlm.errors import InputError
from maxlm.rl.rewards.prompts import read_prompts
from maxlm.rl.rewards.scorer import check_tasks
from tests.conftest import ROOT


def command(kind, name, folder):
    """Returns the arguments of a command in a config's docstring, with `folder` as the data directory."""
    docstring = (ROOT / f'configs/{kind}.py').read_text().split('"""')[1].replace('\\\n', ' ')
    (line,) = [line for line in docstring.splitlines() if f'{name} ' in line]
    words = line.partition(f'{name} ')[2].split()
    return [word.replace('data/', f'{folder}/') for word in words]


@pytest.mark.parametrize('kind', tasks.KINDS)
def test_data_and_windows_go_together(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sft, rl = (load(f'configs/{kind}.py:{variant}') for variant in ('sft', 'rl'))
    assert tasks.main(command(kind, 'examples.tasks', tmp_path)) == 0
    assert prepare.main([*command(kind, 'maxlm prepare', tmp_path), '--workers', '1', '--quiet']) == 0
    dataset = load_manifest(tmp_path / sft.data.path.removeprefix('data/'))
    assert dataset.packed_window == sft.data.seq_len
    assert not any(counts['left_out'] or counts['shortened'] for counts in dataset.chat.values())
    encoder = ChatEncoder.load(dataset.path)
    check_grpo(rl)
    for path, reward in ((rl.grpo.prompts, rl.grpo.reward), (rl.grpo.eval_prompts, rl.grpo.eval_reward)):
        path = str(tmp_path / path.removeprefix('data/'))
        prompts = read_prompts(path, encoder, rl.data.seq_len - rl.grpo.max_completion_length)
        assert prompts.num_dropped == 0
        check_tasks(prompts, reward or rl.grpo.reward)
    chats = (json.loads(line) for line in (tmp_path / kind / 'chats.jsonl').read_text().splitlines())
    answers = encoder.tokenizer.encode_batch([chat['messages'][1]['content'] for chat in chats])
    # The length includes the end of turn.
    assert max(map(len, answers)) + 1 <= rl.grpo.max_completion_length


@pytest.mark.parametrize('kind', tasks.KINDS)
def test_the_model_is_the_same_in_both(kind, monkeypatch):
    monkeypatch.chdir(ROOT)
    sft, rl = (load(f'configs/{kind}.py:{variant}') for variant in ('sft', 'rl'))
    assert rl.model == sft.model
    assert rl.train.init_from == f'runs/{kind}-sft'
    with pytest.raises(InputError, match=r'requires train\.objective=grpo'):
        check_grpo(sft)
