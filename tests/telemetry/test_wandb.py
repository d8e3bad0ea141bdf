"""Tests W&B: an offline run equals metrics.jsonl, a resumed run continues, and failures of W&B never affect a run."""

import importlib.util
import json
import os
import re
import signal
import struct

import pytest

pytest.importorskip('wandb', reason='the extra wandb')

from maxlm.errors import InputError
from maxlm.installation import pip_install
from maxlm.telemetry.metrics import MetricWriter, read_metrics
from maxlm.telemetry.wandb import WeightsAndBiases
from maxlm.workdir.files import WANDB_ID_FILE
from tests.small import small_config

BLOCK = 32768


def records(path):
    """Yields the records of a .wandb file, a LevelDB log: blocks of fragments with checksum, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    assert content[:4] == b':W&B'
    position, fragments = 7, b''
    while position + 7 <= len(content):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack('<IHB', content[position : position + 7])
        if kind == 0:
            break
        fragments += content[position + 7 : position + 7 + length]
        position += 7 + length
        # 1: complete record, 4: last fragment.
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(fragments)
            yield record
            fragments = b''


def read_back(workdir):
    """Returns id, project, name and config of all attempts, and the logged lines."""
    runs, lines = [], []
    for path in sorted((workdir / 'wandb').glob('offline-run-*/*.wandb')):
        for record in records(path):
            if record.HasField('run'):
                run = record.run
                config = {item.key: json.loads(item.value_json) for item in run.config.update}
                runs.append((run.run_id, run.project, run.display_name, config))
            if record.HasField('history'):
                items = {
                    '/'.join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                lines.append({name: value for name, value in items.items() if not name.startswith('_')})
    return runs, lines


def config(**overrides):
    return small_config(metrics__wandb='offline', metrics__wandb_project='my-project', **overrides)


def write_metrics(workdir, tracker, steps, *, after_step, factor=1.0):
    writer = MetricWriter(workdir, after_step=after_step, trackers=[tracker])
    for step in steps:
        values = {'train/loss': factor / step, 'train/loss/web': 2.0, 'perf/mfu': float('nan')}
        writer.write(step, 1000.0 + step, values)
        if step % 4 == 0:
            writer.write(step, 1000.5 + step, {'eval/loss': 2 * factor / step})
            writer.write_samples(step, 1000.5 + step, [('a <b>', ' & c')])


def without_nulls(lines):
    return [{name: value for name, value in line.items() if value is not None} for line in lines]


def test_offline_run_equals_metrics_jsonl(tmp_path):
    tracker = WeightsAndBiases(tmp_path, config(), close_seconds=60)
    write_metrics(tmp_path, tracker, range(1, 7), after_step=0)
    tracker.close()
    # The run is killed after step 6 and resumes from a checkpoint of step 4, with the same numbers.
    tracker = WeightsAndBiases(tmp_path, config(), close_seconds=60)
    write_metrics(tmp_path, tracker, range(5, 10), after_step=4)
    runs, lines = read_back(tmp_path)
    before = read_metrics(tmp_path)
    # The run rolls back to step 7 and skips the bad batches.
    write_metrics(tmp_path, tracker, range(8, 10), after_step=7, factor=3.0)
    tracker.close()
    runs, lines = read_back(tmp_path)
    assert {run_id for run_id, *_ in runs} == {(tmp_path / WANDB_ID_FILE).read_text().strip()}
    assert len({id(run) for run in runs}) >= 2
    _, project, name, logged = runs[0]
    assert (project, name) == ('my-project', tmp_path.name)
    assert logged['model']['dim'] == 32
    assert 'alerts' not in logged
    assert [line['step'] for line in lines if 'samples/0/_type' in line] == [4, 8, 8]
    scalars = [line for line in lines if 'time' in line]
    assert [line['step'] for line in scalars] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 8, 8, 9]
    # The log contains the lines of metrics.jsonl before the rollback, followed by the lines after it.
    after = [line for line in read_metrics(tmp_path) if line['step'] > 7]
    assert scalars == without_nulls([*before, *after])
    # Control: the numbers after the rollback differ.
    assert scalars != without_nulls([*before, *before[-3:]])


def test_failing_upload_logs_one_warning(tmp_path, monkeypatch, caplog):
    # No account is configured. On a terminal, W&B would prompt for one.
    for name, value in {
        'HOME': str(tmp_path),
        'NETRC': str(tmp_path / 'none'),
        'WANDB_BASE_URL': 'http://127.0.0.1:9',
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    tracker = WeightsAndBiases(tmp_path, small_config(metrics__wandb='online'), close_seconds=60)
    write_metrics(tmp_path, tracker, range(1, 10), after_step=0)
    with caplog.at_level('INFO', logger='maxlm'):
        tracker.close()
    (warning,) = caplog.messages
    assert warning.startswith('metrics.wandb=online: ')
    assert warning.endswith('the run continues without W&B')
    assert len(read_metrics(tmp_path)) == 11


def test_hanging_child_does_not_delay_close(tmp_path, caplog):
    tracker = WeightsAndBiases(tmp_path, config(), close_seconds=0.1)
    os.kill(tracker._child.pid, signal.SIGSTOP)
    try:
        # More data than fits into a pipe.
        write_metrics(tmp_path, tracker, range(1, 2000), after_step=0)
        with caplog.at_level('INFO', logger='maxlm'):
            tracker.close()
    finally:
        os.killpg(tracker._child.pid, signal.SIGKILL)
    assert [line['step'] for line in read_metrics(tmp_path)][-1] == 1999
    assert 'after the run' in caplog.text


def test_missing_extra_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(InputError, match=re.escape(pip_install('wandb'))):
        WeightsAndBiases(tmp_path, config())
