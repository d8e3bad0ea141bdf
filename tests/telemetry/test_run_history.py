"""Tests `RunHistory`, which combines all files of a local or remote workdir, including damaged files."""

import dataclasses
import json
import random
from pathlib import Path

import fsspec
import pytest

from maxlm.errors import InputError
from maxlm.supervision.elastic_hosts import ElasticHosts
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.run_history import HistoryReader, read_history
from maxlm.telemetry.run_status import run_status
from maxlm.workdir.files import CONFIG
from maxlm.workdir.lock import LOCK
from tests import workdirs
from tests.workdirs import BUILDERS, NOW


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_history_contains_all_files(tmp_path):
    workdir = workdirs.finished(tmp_path / 'my run')
    history = read_history(workdir)
    assert (history.name, history.workdir) == ('my run', str(workdir))
    assert history.config == workdirs.config()
    assert history.metrics == lines(workdir / 'metrics.jsonl')
    assert history.events == lines(workdir / 'events.jsonl')
    assert history.samples == lines(workdir / 'samples.jsonl')
    assert history.devices == {0: lines(workdir / 'devices.jsonl')}
    assert history.heartbeats == {0: lines(workdir / 'goodput.jsonl')}
    assert history.goodput_logs == {0: read_goodput(workdir)}
    assert (history.started['life'], history.notes, history.alive) == (2, (), False)


def test_the_builders_are_consistent(tmp_path):
    """Checks that the categories add up to the time from the first start to the last line of each workdir."""
    for name, build in BUILDERS.items():
        history = read_history(build(tmp_path / name))
        for process, ledger in history.goodput_logs.items():
            beats = history.heartbeats[process]
            assert ledger.seconds == pytest.approx(beats[-1]['time'] - beats[0]['began'], abs=0.01), name
        assert bool(history.goodput_logs) == (name != 'empty')
    assert read_history(tmp_path / 'crashed').goodput_logs[0].totals['lost'] > 30
    assert read_history(tmp_path / 'finished').goodput_logs[0].totals['lost'] == 0
    assert read_history(tmp_path / 'finished').goodput_logs[0].totals['idle'] == pytest.approx(60, abs=0.01)


def test_history_of_several_processes(tmp_path):
    history = read_history(workdirs.two_hosts(tmp_path))
    assert list(history.goodput_logs) == list(history.devices) == list(history.heartbeats) == [0, 1]
    assert history.devices[1][0]['host'] == 'host1'
    assert len(history.devices[1][0]['devices']) == 4
    assert history.goodput_logs[1].totals['data_wait'] > history.goodput_logs[0].totals['data_wait']


def test_quarantined_hosts_are_reported(tmp_path):
    workdir = workdirs.two_hosts(tmp_path / 'run')
    elastic_hosts = ElasticHosts(workdir)
    elastic_hosts.open()
    assert read_history(workdir).notes == ()
    elastic_hosts.quarantine('host1', 'wrong values')
    assert read_history(workdir).notes == ('elastic: host1 is quarantined, because it computed wrong results',)


def test_torn_lines_are_reported(tmp_path):
    complete, torn = read_history(workdirs.running(tmp_path / 'a/run')), read_history(workdirs.torn(tmp_path / 'b/run'))
    names = ('devices', 'goodput', 'metrics', 'events', 'samples')
    assert torn.notes == tuple(f'{name}.jsonl: skipped the incomplete last line' for name in names)
    assert complete.notes == ()
    assert (torn.metrics, torn.events, torn.goodput_logs) == (complete.metrics, complete.events, complete.goodput_logs)


@pytest.mark.parametrize('name', ['perf/mfu', 'perf/mfu_full'])
def test_mfu_above_1_is_removed_from_all_lines(tmp_path, name):
    workdir = workdirs.finished(tmp_path / 'run')
    path = workdir / 'metrics.jsonl'
    expected = lines(path)
    assert read_history(workdir).metrics == expected
    expected[5][name] = 1.01
    path.write_text(''.join(json.dumps(line) + '\n' for line in expected))
    history = read_history(workdir)
    assert history.metrics == [{key: line[key] for key in line if not key.startswith('perf/mfu')} for line in expected]
    (note,) = history.notes
    assert note.startswith('metrics.jsonl: MFU is hidden because it exceeds 1 in 1 lines')


def test_empty_directory_has_not_started(tmp_path):
    history = read_history(workdirs.empty(tmp_path))
    assert (history.has_started, history.notes, history.started) == (False, (), {})
    assert read_history(workdirs.fresh(tmp_path / 'a')).has_started


@pytest.mark.parametrize('url', ['', 'memory://missing_bucket/run'])
def test_missing_workdir_is_an_error(tmp_path, url):
    with pytest.raises(InputError, match=r'give a workdir of maxlm train'):
        read_history(url or tmp_path / 'missing')


def test_other_directories_are_errors(tmp_path):
    (tmp_path / 'notes.txt').write_text('x')
    with pytest.raises(InputError, match=r'not a workdir of maxlm train'):
        read_history(tmp_path)
    with pytest.raises(InputError, match='Not a directory'):
        read_history(tmp_path / 'notes.txt')
    # Models from other sources also have a config.json.
    (tmp_path / CONFIG).write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(InputError, match=r'not a workdir of maxlm train'):
        read_history(tmp_path)
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
    assert read_history(tmp_path).metrics == [{'step': 1}]


def test_invalid_config_is_reported_and_other_files_are_read(tmp_path):
    workdirs.running(tmp_path)
    (tmp_path / CONFIG).write_text('{"model": {"unknown_key": 3}}')
    history = read_history(tmp_path)
    assert history.config is None
    assert history.metrics
    assert [note.partition(' (')[0] for note in history.notes] == [
        'config.json: not a valid config of this version of maxlm'
    ]
    (tmp_path / CONFIG).unlink()
    assert read_history(tmp_path).notes == ('config.json: missing',)


def test_run_of_an_older_version_has_only_metrics(tmp_path):
    workdirs.running(tmp_path)
    for name in ('events', 'goodput', 'devices', 'samples'):
        (tmp_path / f'{name}.jsonl').unlink()
    history = read_history(tmp_path)
    assert (history.notes, history.goodput_logs, history.started) == (('events.jsonl: missing',), {}, {})
    assert history.has_started


def test_alive_is_derived_from_the_lock(tmp_path):
    workdirs.running(tmp_path)
    assert read_history(tmp_path).alive is None
    workdirs.lock(tmp_path, here=True)
    assert read_history(tmp_path).alive is True
    owner = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**owner, 'born': '1'}))
    assert read_history(tmp_path).alive is False
    (tmp_path / LOCK).write_text('{')
    assert read_history(tmp_path).alive is None
    (tmp_path / LOCK).unlink()
    assert read_history(tmp_path).alive is False


def test_reader_returns_appended_lines(tmp_path):
    workdirs.running(tmp_path)
    reader = HistoryReader(tmp_path)
    before = reader.read()
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 240, "time": 1}\n')
    after = reader.read()
    assert after.metrics == [*before.metrics, {'step': 240, 'time': 1}]
    # Earlier results do not change.
    assert before.metrics[-1]['step'] == 230
    assert after == read_history(tmp_path)


def test_remote_workdir(tmp_path):
    workdir = workdirs.two_hosts(tmp_path / 'run')
    filesystem = fsspec.filesystem('memory')
    for path in workdir.iterdir():
        filesystem.pipe_file(f'/history_bucket/run/{path.name}', path.read_bytes())
    remote = read_history('memory://history_bucket/run/')
    assert (remote.workdir, remote.name, remote.alive) == ('memory://history_bucket/run', 'run', None)
    assert dataclasses.replace(remote, workdir=str(workdir)) == read_history(workdir)


JUNK = (None, True, -1, 0, 1e308, 10**400, float('nan'), 'x', '\x1b[31m', '', [], [1, 'a'], {}, {'a': 1})


def damage(workdir, rng):
    """Replaces values with junk, removes keys and truncates lines."""
    for path in sorted(Path(workdir).glob('*.jsonl')):
        damaged = []
        for line in lines(path):
            if rng.random() < 0.3:
                key = rng.choice(list(line))
                line[key] = rng.choice(JUNK)
                if rng.random() < 0.3:
                    del line[key]
            text = json.dumps(line)
            damaged.append(text[: rng.randrange(len(text))] if rng.random() < 0.03 else text)
        rng.shuffle(damaged)
        path.write_text('\n'.join(damaged[rng.randrange(len(damaged)) :]))


@pytest.mark.parametrize('seed', range(10))
def test_damaged_files_do_not_fail_reading(tmp_path, seed):
    rng = random.Random(seed)
    for build in (workdirs.two_hosts, workdirs.crashed, workdirs.diverged):
        workdir = build(tmp_path / build.__name__)
        damage(workdir, rng)
        history = read_history(workdir)
        assert history.notes
        assert run_status(history, NOW).state
