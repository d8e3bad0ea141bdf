"""Former names of config keys, metrics and options, and runs that were written with them."""

import json
import tarfile

import pytest

from maxlm.cli.parser import ArgumentParser
from maxlm.cli.runs import train
from maxlm.cli.setup import plan
from maxlm.config.keys import current_config, declared_keys
from maxlm.config.loading import default, load
from maxlm.config.renames import METRIC_PREFIXES, METRICS, OPTIONS, _reported, current_metrics
from maxlm.config.serialization import from_json, to_json
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.telemetry import metrics
from maxlm.telemetry.metrics import read_metrics
from maxlm.workdir.files import CONFIG, METRICS_FILE, read_config
from tests.conftest import ROOT

# Former name → current key and the former names of its values.
KEYS = {
    former: (name, renamed.values) for name, key in declared_keys().items() for former, renamed in key.renamed.items()
}
VALUES_BEFORE = {name: key.value_before.value for name, key in declared_keys().items() if key.value_before is not None}
TINY = f'{ROOT}/configs/tiny.py'


@pytest.fixture(autouse=True)
def nothing_reported():
    _reported.clear()


def value_of(values, key):
    section, _, name = key.partition('.')
    return values[section][name]


def test_new_names_exist_and_former_ones_do_not():
    assert len(KEYS) == sum(len(key.renamed) for key in declared_keys().values()) >= 80
    assert not set(KEYS) & set(declared_keys())
    names = metrics.METRICS
    assert set(METRICS.values()) <= {*names}
    assert not set(METRICS) & {*names}
    assert {f'{new}*' for new in METRIC_PREFIXES.values()} <= {*names}


@pytest.mark.parametrize('old', KEYS)
def test_a_config_file_can_use_a_former_key(old, capsys):
    (new, renamed), values = KEYS[old], default()
    section, _, name = old.partition('.')
    former = next(iter(renamed or [value_of(values, new)]))
    values[section][name] = former
    assert value_of(values, new) == renamed.get(former, former)
    assert getattr(values[section], name) == value_of(values, new)
    assert capsys.readouterr().err == (
        f'warning: config key {old} is now {new}; the former name works until release 0.3\n'
    )


def test_a_command_line_can_use_a_former_key(capsys):
    config = load(TINY, ['train.max_skipped_steps=7', 'data.window=64', 'grpo.loss_mean=sequence'])
    assert (config.guard.max_consecutive_skips, config.data.seq_len, config.grpo.loss_type) == (7, 64, 'grpo')
    assert capsys.readouterr().err.count('warning: ') == 3
    # If two keys set the same value, the key on the command line counts, with either name.
    assert load(TINY, ['train.global_batch_tokens=1024']).train.global_batch_size == 0


def test_a_former_config_json_is_read_without_warnings(capsys):
    former = {'model': {'num_layers': 1, 'dim': 8, 'num_heads': 2}}
    for old, (new, renamed) in KEYS.items():
        section, _, name = old.partition('.')
        if (value := next(iter(renamed or [value_of(default(), new)]))) is not None:
            former.setdefault(section, {})[name] = value
    config = from_json(json.dumps(former))
    assert config.grpo.loss_type == 'grpo'
    assert capsys.readouterr().err == ''
    assert current_config({'no': 'config', 'data': {'window': 3, 'path': 'x'}}) == {
        'no': 'config',
        'data': {'seq_len': 3, 'path': 'x', 'train_first_token': False},
    }
    # Such a run keeps the meaning of its time; new configs have another default.
    assert not config.data.train_first_token
    assert from_json(json.dumps({'model': former['model']})).data.train_first_token
    written = to_json(config).replace('"train_first_token": false', '"train_first_token": true')
    assert from_json(written).data.train_first_token
    assert config.optimizer.warmup_from_zero
    assert not from_json(json.dumps({'model': former['model']})).optimizer.warmup_from_zero


def test_values_before_a_key_existed_differ_from_its_default():
    for key, value in VALUES_BEFORE.items():
        assert type(value_of(default(), key)) is type(value)
        assert value_of(default(), key) != value


def test_lines_of_metrics_have_the_current_names():
    line = {'step': 1, **dict.fromkeys(METRICS, 0.5), 'data/share/web': 0.25, 'train/loss': 2.0}
    expected = {'step': 1, **dict.fromkeys(METRICS.values(), 0.5), 'data/fraction/web': 0.25, 'train/loss': 2.0}
    assert current_metrics(line) == expected


def parsed(argv, prog='maxlm prepare'):
    parser = ArgumentParser(prog=prog)
    parser.add_argument('--dedup-threshold')
    parser.add_argument('rest', nargs='*')
    return parser.parse_args(argv)


@pytest.mark.parametrize('option', ['--dedup-threshold', '--dedup_threshold', '--near-threshold', '--near_threshold'])
def test_options_can_have_underscores_and_former_names(option, capsys):
    assert parsed([f'{option}=a_b']).dedup_threshold == parsed([option, 'a_b']).dedup_threshold == 'a_b'
    warned = 'warning: prepare --near-threshold is now --dedup-threshold; the former name works until release 0.3\n'
    assert capsys.readouterr().err == (warned if 'near' in option else '')


def test_other_arguments_are_unchanged(capsys):
    assert parsed(['--', '--near_threshold']).rest == ['--near_threshold']
    with pytest.raises(Exception, match='--near-threshold'):
        parsed(['--near-threshold=1'], prog='maxlm plan')
    assert capsys.readouterr().err == ''


def test_former_options_are_known_to_their_commands(capsys):
    assert (
        exit_code(plan.main, [f'--config={TINY}', '--target=v4:2x2x1', '--estimate', '--vocab_size=64', '--fit']) == 0
    )
    assert 'warning: plan --fit is now --search' in capsys.readouterr().err
    assert {'prepare', 'serve', 'plan'} <= {*OPTIONS}


def test_a_run_of_release_0_1_resumes(dataset, tmp_path, capsys):
    """The last commit with the former names wrote this workdir with the data set of the fixture `dataset`."""
    with tarfile.open(ROOT / 'tests/golden/workdir_0_1.tar.xz') as archive:
        archive.extraction_filter = getattr(tarfile, 'data_filter', None)  # Not in Python 3.11.0 to 3.11.3.
        archive.extractall(tmp_path / 'run')
    assert 'window' in json.loads((tmp_path / 'run' / CONFIG).read_text())['data']
    before = read_config(tmp_path / 'run')
    assert (before.data.seq_len, before.checkpoint.max_to_keep) == (32, 2)
    argv = [f'--config={tmp_path}/run/{CONFIG}', f'--workdir={tmp_path}/run', f'--config.data.path={dataset}']
    mesh = ['--config.mesh.data=4', '--config.mesh.context=2', '--config.train.per_device_batch_size=1']
    assert exit_code(train.main, [*argv, *mesh, '--config.train.num_steps=6']) == EXIT_DONE
    assert 'is now' not in capsys.readouterr().err
    lines = [line for line in read_metrics(tmp_path / 'run') if 'train/loss' in line]
    assert [line['step'] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line['perf/step_time_seconds'] > 0 and line['data/seq_len'] == 32 for line in lines)
    # Existing lines of the file are unchanged.
    assert '"perf/step_seconds"' in (tmp_path / 'run' / METRICS_FILE).read_text()
    assert [line['train/tokens'] for line in lines] == [128 * step for step in range(1, 7)]


@pytest.mark.parametrize(('former', 'current'), [('True', 1), ('false', 0), ('yes', 1)])
def test_a_former_switch_is_a_number(former, current):
    assert load(TINY, [f'grpo.async_rollouts={former}']).grpo.max_staleness == current
    switch = former != 'false'
    assert current_config({'grpo': {'async_rollouts': switch}})['grpo']['max_staleness'] == current
    values = default()
    values.grpo.async_rollouts = switch
    assert values.grpo.max_staleness == current
