"""Tests the `Next: …` lines: on stderr after success, with commands that parse; none in machine-readable output."""

import os
import shlex

import pytest

from maxlm.cli.commands import module_of
from maxlm.cli.hints import HINTS, print_next
from maxlm.cli.parser import ArgumentParser
from maxlm.cli.runs import recipe, report
from maxlm.cli.setup import configs, plan, prepare
from maxlm.errors import EXIT_DONE, InputError
from tests.conftest import ROOT


class ParsedError(Exception):
    """Stops a command after it has parsed its arguments."""


@pytest.fixture(autouse=True)
def hints(monkeypatch):
    """Shows the lines, which tests/conftest.py hides."""
    monkeypatch.delenv(HINTS)


@pytest.fixture
def next_words(capsys, monkeypatch):
    """Returns a function that runs a command and returns the words of its `Next:` line, whose options must parse."""
    parse = ArgumentParser.parse_args

    def next_words(main, *arguments):
        assert main(list(map(str, arguments))) == EXIT_DONE
        out, err = capsys.readouterr()
        assert 'Next: ' not in out
        *_, last = err.splitlines() or ['']
        assert err.count('Next: ') == last.startswith('Next: ')
        words = shlex.split(last.removeprefix('Next: '))
        if words[:1] == ['maxlm']:
            assert_parses(words[1:])
        return words

    def assert_parses(words):
        def parse_and_stop(self, args=None, namespace=None):
            parse(self, args, namespace)
            raise ParsedError

        with monkeypatch.context() as context:
            context.setattr(ArgumentParser, 'parse_args', parse_and_stop)
            with pytest.raises(ParsedError):
                module_of(words[0]).main(words[1:])
            # Control: an option that the command does not have.
            with pytest.raises(InputError):
                module_of(words[0]).main([*words[1:], '--nonsense'])

    return next_words


def test_the_line_is_quoted_and_can_be_hidden(capsys, monkeypatch):
    print_next('maxlm', 'report', 'runs/my run')
    assert capsys.readouterr() == ('', "Next: maxlm report 'runs/my run'\n")
    monkeypatch.setenv(HINTS, '0')
    print_next('maxlm', 'report', 'runs/my run')
    assert capsys.readouterr() == ('', '')


def test_prepare_continues_with_training_on_its_output(next_words, tmp_path):
    (tmp_path / 'a.txt').write_text('some text\n' * 200)
    options = ['--input', tmp_path / 'a.txt', '--workers', 1, '--tokenizer', 'bytes']
    words = next_words(prepare.main, *options, '--output', tmp_path / 'out')
    assert words == ['maxlm', 'train', '--config=tiny', '--workdir=runs/out', f'--config.data.path={tmp_path}/out']
    # Again: the data is already prepared.
    assert next_words(prepare.main, *options, '--output', tmp_path / 'out') == words
    assert next_words(prepare.main, *options, '--output', tmp_path / 'quiet', '--quiet') == []


def test_a_stage_continues_with_the_next_one(next_words, tmp_path):
    (tmp_path / 'a.txt').write_text('some text\n' * 200)
    options = ['--input', str(tmp_path / 'a.txt'), '--workers', '1', '--tokenizer', 'bytes', '--output']
    options.append(str(tmp_path / 'out'))
    # Other tasks of the stage may be running.
    assert next_words(prepare.main, *options, '--stage', 'scan', '--task', '0/2') == []
    words = next_words(prepare.main, *options, '--stage', 'scan')
    for stage in ('plan', 'shards', 'merge'):
        assert words == ['maxlm', 'prepare', *options, f'--stage={stage}']
        words = next_words(prepare.main, *words[2:])
    assert words[:2] == ['maxlm', 'train']


def test_prepared_pairs_continue_with_their_objective(next_words, tmp_path):
    line = '{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}\n'
    (tmp_path / 'a.jsonl').write_text(line * 40)
    options = ['--input', tmp_path / 'a.jsonl', '--workers', 1, '--tokenizer', 'bytes', '--pack-seq-len', 128]
    words = next_words(prepare.main, *options, '--output', tmp_path / 'out')
    assert words[2:] == [
        '--config=finetune:dpo',
        '--workdir=runs/out',
        f'--config.data.path={tmp_path}/out',
        '--config.data.seq_len=128',
        '--config.train.init_from=WORKDIR',
    ]


def test_plan_continues_with_doctor_for_the_same_config(next_words):
    options = ['--config=neox:production', '--target=h100:8', '--estimate', '--config.train.seed=3']
    assert next_words(plan.main, *options) == [
        'maxlm',
        'doctor',
        '--config=neox:production',
        '--config.train.seed=3',
    ]
    assert next_words(plan.main, *options, '--json') == []
    *start, search = next_words(plan.main, *options, '--sweep=8,16')
    assert start == ['maxlm', 'plan', '--config=neox:production', '--config.train.seed=3', '--target=h100:8']
    assert search == '--search'
    # The options that the search finds replace those of the command line.
    words = next_words(plan.main, *options, '--config.mesh.fsdp=8', '--search')
    assert words[:4] == ['maxlm', 'doctor', '--config=neox:production', '--config.train.seed=3']
    assert [word.partition('=')[0] for word in words].count('--config.mesh.fsdp') == 1
    assert '--config.mesh.fsdp=8' not in words


def test_configs(next_words):
    assert next_words(configs.main) == ['maxlm', 'configs', 'show', 'tiny']
    assert next_words(configs.main, 'show', 'tiny') == []


def test_only_the_recipe_itself_prints_a_line(next_words, monkeypatch, tmp_path):
    seen = []
    # The inputs of the first phase are checked.
    (tmp_path / 'text.txt').write_text('Some text.')
    monkeypatch.setattr(recipe, 'run_phases', lambda commands, **_: seen.append(os.environ[HINTS]) or EXIT_DONE)
    words = next_words(recipe.main, f'--config={ROOT}/configs/neox.py:smoke', f'text={tmp_path}')
    assert words[:2] == ['maxlm', 'report']
    assert seen == ['0']
    assert os.environ[HINTS] == '1'


def test_a_failure_prints_no_line(next_words, tmp_path, capsys):
    # Control: report prints a line only if it wrote a page.
    assert next_words(report.main, tmp_path) == []
    with pytest.raises(InputError):
        prepare.main(['--input', str(tmp_path / 'missing'), '--output', str(tmp_path / 'out')])
    assert 'Next: ' not in capsys.readouterr().err
