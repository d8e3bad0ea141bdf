"""Tests the run recorder: numbering and outcome of attempts, and figures that continue across attempts."""

import contextlib
import json
import logging
import time

import pytest

from maxlm.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError
from maxlm.hardware.prices import Price
from maxlm.log import logger
from maxlm.storage.jsonl import read_lines
from maxlm.telemetry import run_recorder as diary_module
from maxlm.telemetry.events import read_events
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.run_recorder import RunRecorder
from maxlm.telemetry.timeline import Timeline


class Life:
    """An attempt on a clock that the test moves. Attempts follow each other in a workdir."""

    def __init__(self, workdir, *, pause=0.0, process=0, price=None, beat_seconds=0.0, alone=True):
        self.now = 0.0
        ended = read_goodput(workdir, process).attempts
        began = ended[-1].time + pause if ended else time.time() - 1e6
        self.timeline = Timeline(clock=lambda: self.now)
        # The fake clock does not know when the process started.
        self.timeline.start_time = began
        self.step, self.saved_step = 0, None
        self.diary = RunRecorder(
            workdir,
            self.timeline,
            interval_seconds=beat_seconds,
            num_devices=4,
            price=price and Price(price, 'by hand'),
            process=process,
            is_only_process=alone,
        )

    def begin(self, step):
        self.step = step
        self.timeline.started()
        self.diary.begin(step, lambda: (self.step, self.saved_step))

    def steps(self, count):
        with self.timeline.phase('step'):
            self.now += 10.0 * count
        self.step += count

    def save(self):
        with self.timeline.phase('checkpoint'):
            self.now += 5.0
        self.saved_step = self.step
        self.diary.record_save()


def kinds(workdir):
    return [(event['life'], event['kind'], event.get('code')) for event in read_events(workdir).lines]


def test_attempt_from_start_to_end(tmp_path):
    life = Life(tmp_path, price=90.0)
    with life.diary as diary:
        life.now += 30.0
        assert diary.step is None
        diary.record_event('started', 'on a machine', host='a')
        life.begin(0)
        life.steps(4)
        life.save()
        diary.record_event('saved', 'so it is')
        life.steps(2)
        diary.set_outcome('finished', 'all is done', 0)
    ledger = read_goodput(tmp_path)
    assert ledger.seconds == pytest.approx(30 + 60 + 5)
    # Four devices at 90 dollars an hour cost a dollar every ten seconds.
    assert ledger.dollars == pytest.approx(ledger.seconds / 10)
    only = ledger.attempts[0]
    assert (only.start_step, only.step, only.saved_step, only.is_closed) == (0, 6, 4, True)
    events = read_events(tmp_path).lines
    assert kinds(tmp_path) == [(1, 'started', None), (1, 'saved', None), (1, 'finished', 0)]
    assert [event['step'] for event in events] == [None, 4, 6]
    whys = [line['why'] for line in read_lines(tmp_path / 'goodput.jsonl').lines]
    assert whys == ['beat', 'beat', 'saved', 'end'][-len(whys) :]


def test_metrics_continue_across_attempts(tmp_path):
    life = Life(tmp_path, price=90.0)
    life.diary.__enter__()
    life.begin(0)
    life.steps(4)
    life.save()
    life.steps(2)
    life.diary._write('beat')
    # The attempt is killed here. The next one has lost two steps.
    life = Life(tmp_path, price=90.0, pause=35.0)
    with life.diary as diary:
        assert diary.attempt == 2
        assert diary.previous_seconds == pytest.approx(65.0)
        life.now += 20.0
        life.begin(4)
        life.steps(2)
        metrics = diary.metrics(6, 16)
        assert metrics['cost/hours'] * 3600 == pytest.approx(65 + 40)
        assert metrics['cost/dollars'] == pytest.approx(10.5)
        # Ten steps of ten seconds remain.
        assert metrics['perf/eta_seconds'] == pytest.approx(100.0)
        assert metrics['cost/projected_dollars'] == pytest.approx(20.5)
        # Six steps of ten seconds count, out of 140 s with the pause.
        assert metrics['goodput/fraction'] == pytest.approx(60 / 140)
        # The time of a save counts towards the remaining time.
        life.save()
        assert diary.metrics(6, 16)['perf/eta_seconds'] == pytest.approx(125.0)
        assert 'perf/eta_seconds' not in diary.metrics(6, None)
        diary.set_outcome('finished', '', 0)
    assert read_goodput(tmp_path).fraction == pytest.approx(60 / 145)


def test_rollback_reduces_goodput(tmp_path):
    life = Life(tmp_path)
    with life.diary as diary:
        life.begin(0)
        life.steps(4)
        life.save()
        life.steps(3)
        assert diary.metrics(7, 10)['goodput/fraction'] == pytest.approx(70 / 75)
        diary.record_rollback(4)
        life.begin(4)
        assert diary.metrics(4, 10)['goodput/fraction'] == pytest.approx(40 / 75)
        assert 'cost/dollars' not in diary.metrics(4, 10)
        life.steps(1)
    ledger = read_goodput(tmp_path)
    assert ledger.totals['lost'] == pytest.approx(30.0)
    assert ledger.totals['step'] == pytest.approx(50.0)
    assert ledger.attempts[0].start_step == 0


@pytest.mark.parametrize(
    ('error', 'kind', 'code', 'message'),
    [
        (InputError('x.bin: is damaged'), 'failed', EXIT_BAD_INPUT, 'x.bin: is damaged'),
        (ValueError('odd'), 'failed', EXIT_FAILED, 'ValueError: odd'),
        (KeyboardInterrupt(), 'failed', EXIT_INTERRUPTED, 'KeyboardInterrupt:'),
    ],
)
@pytest.mark.parametrize('alerted', [False, True])
def test_error_gives_one_final_event(tmp_path, error, kind, code, message, alerted):
    with contextlib.suppress(type(error)), Life(tmp_path).diary as diary:
        if alerted:
            diary.record_alert('failed', 'as an alert has it')
            diary.record_event('storage', 'meanwhile')
        raise error
    last = read_events(tmp_path).lines[-1]
    assert (last['kind'], last['code']) == (kind, code)
    assert last['message'] == ('as an alert has it' if alerted else message)
    assert last.get('alert', False) == alerted
    assert [one[1] for one in kinds(tmp_path)].count('failed') == 1


def test_error_after_the_outcome_is_the_final_event(tmp_path):
    with contextlib.suppress(OSError), Life(tmp_path).diary as diary:
        diary.set_outcome('finished', 'all is done', 0)
        raise OSError('full')
    assert kinds(tmp_path) == [(1, 'failed', EXIT_FAILED)]


def test_alerts_are_events_and_divergence_is_the_final_one(tmp_path):
    with Life(tmp_path).diary as diary:
        diary.record_alert('diverged', 'steps 3 to 9')
        diary.record_alert('storage', 'the bucket does not answer')
    events = read_events(tmp_path).lines
    assert [(event['kind'], event['alert'], event.get('code')) for event in events] == [
        ('storage', True, None),
        ('diverged', True, EXIT_FAILED),
    ]


@pytest.mark.parametrize(
    ('code', 'wanted'),
    [
        (EXIT_PREEMPTED, ('preempted', EXIT_PREEMPTED, 'process 1 is gone', None)),
        (EXIT_FAILED, ('failed', EXIT_FAILED, 'a collective failed', True)),
    ],
)
def test_cause_of_a_collective_error_is_recorded_at_exit(tmp_path, code, wanted):
    with contextlib.suppress(ValueError), Life(tmp_path, alone=False).diary as diary:
        diary.record_alert('failed', 'a collective failed')
        raise ValueError('a collective failed')
    assert kinds(tmp_path) == []
    diary.record_exit(code, 'process 1 is gone')
    (last,) = read_events(tmp_path).lines
    assert (last['kind'], last['code'], last['message'], last.get('alert')) == wanted
    # Bad input is the process's own failure.
    with contextlib.suppress(InputError), Life(tmp_path, alone=False).diary:
        raise InputError('x.bin: is damaged')
    assert kinds(tmp_path)[1:] == [(2, 'failed', EXIT_BAD_INPUT)]


@pytest.mark.parametrize(('code', 'kind'), [(EXIT_PREEMPTED, 'preempted'), (EXIT_FAILED, 'failed')])
def test_immediate_exit_is_recorded(tmp_path, code, kind):
    diary = Life(tmp_path).diary
    diary.__enter__()
    diary.record_exit(code, 'process 3 is gone')
    assert kinds(tmp_path) == [(1, kind, code)]
    assert read_goodput(tmp_path).attempts[0].is_closed
    # Later records of code that is still running are ignored.
    lines = (tmp_path / 'goodput.jsonl').read_text()
    diary.record_save()
    diary.__exit__(None, None, None)
    assert (tmp_path / 'goodput.jsonl').read_text() == lines


def test_other_processes_write_only_their_goodput_log(tmp_path):
    life = Life(tmp_path, process=3, price=90.0)
    with life.diary as diary:
        life.begin(0)
        diary.record_event('saved', 'x')
        diary.set_outcome('finished', '', 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ['goodput-3.jsonl']
    line = read_lines(tmp_path / 'goodput-3.jsonl').lines[-1]
    # The first process counts the cost of all devices.
    assert (line['process'], line['dollars']) == (3, None)


def test_all_processes_use_the_attempt_of_the_first(tmp_path):
    diary = RunRecorder(
        tmp_path, Timeline(), interval_seconds=0.0, num_devices=1, process=1, agree=lambda life: 7 if life == 1 else 0
    )
    assert diary.attempt == 7


def test_heartbeats_are_periodic_and_compacted(tmp_path, monkeypatch):
    monkeypatch.setattr(diary_module, '_MAX_HEARTBEATS', 5)
    life = Life(tmp_path, beat_seconds=0.001)
    with life.diary:
        life.begin(0)
        seen = set()
        while len(seen) < 30:
            life.now += 1.0
            time.sleep(0.002)
            seen.add(read_lines(tmp_path / 'goodput.jsonl').lines[-1]['time'])
        life.steps(1)
        life.save()
    lines = read_lines(tmp_path / 'goodput.jsonl').lines
    assert len(lines) < 15
    assert [line['why'] for line in lines if line['why'] != 'beat'] == ['saved', 'end']
    # The next attempt compacts the file.
    Life(tmp_path)
    assert [line['why'] for line in read_lines(tmp_path / 'goodput.jsonl').lines] == ['saved', 'end']


@pytest.fixture
def told(monkeypatch):
    records = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, 'emit', lambda record: records.append(record.getMessage()))
    monkeypatch.setattr(logger, 'handlers', [handler])
    monkeypatch.setattr(logger, 'level', logging.INFO)
    logger._cache.clear()
    return records


@pytest.mark.parametrize('name', ['goodput.jsonl', 'events.jsonl'])
@pytest.mark.parametrize('content', ['nonsense\n', '{"a": 1}\n', '{"life": null}\n'])
def test_damaged_file_is_renamed_and_the_run_continues(tmp_path, told, name, content):
    (tmp_path / name).write_text(content)
    with RunRecorder(tmp_path, Timeline(), interval_seconds=0.0, num_devices=1) as diary:
        diary.record_event('started', 'x')
    assert (tmp_path / f'{name}.damaged').read_text() == content
    assert kinds(tmp_path)[0] == (1, 'started', None)
    assert len(read_goodput(tmp_path).attempts) == 1
    assert [name in line and 'renamed it to' in line for line in told] == [True]


def test_torn_line_is_skipped_and_reported(tmp_path, told):
    with Life(tmp_path).diary:
        pass
    with (tmp_path / 'goodput.jsonl').open('a') as file:
        file.write(json.dumps({'time': 1})[:-1])
    assert RunRecorder(tmp_path, Timeline(), interval_seconds=0.0, num_devices=1).attempt == 2
    assert told == ['goodput.jsonl: skipped the incomplete last line']
