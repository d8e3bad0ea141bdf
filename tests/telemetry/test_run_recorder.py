"""Tests the run recorder: numbers and outcomes of attempts, and metrics that continue across attempts."""

import contextlib
import json
import logging
import time

import pytest

from maxlm.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError
from maxlm.hardware.prices import Price
from maxlm.log import logger
from maxlm.storage.jsonl import read_lines
from maxlm.telemetry import run_recorder
from maxlm.telemetry.events import read_events
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.run_recorder import RunRecorder
from maxlm.telemetry.timeline import Timeline


class Attempt:
    """An attempt with a simulated clock. Attempts of one workdir follow each other."""

    def __init__(self, workdir, *, pause=0.0, process=0, price=None, beat_seconds=0.0, alone=True):
        self.now = 0.0
        ended = read_goodput(workdir, process).attempts
        began = ended[-1].time + pause if ended else time.time() - 1e6
        self.timeline = Timeline(clock=lambda: self.now)
        # A simulated clock has no start time of the process.
        self.timeline.start_time = began
        self.step, self.saved_step = 0, None
        self.recorder = RunRecorder(
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
        self.recorder.begin(step, lambda: (self.step, self.saved_step))

    def steps(self, count):
        with self.timeline.phase('step'):
            self.now += 10.0 * count
        self.step += count

    def save(self):
        with self.timeline.phase('checkpoint'):
            self.now += 5.0
        self.saved_step = self.step
        self.recorder.record_save()


def kinds(workdir):
    return [(event['life'], event['kind'], event.get('code')) for event in read_events(workdir).lines]


def test_attempt_from_start_to_end(tmp_path):
    attempt = Attempt(tmp_path, price=90.0)
    with attempt.recorder as recorder:
        attempt.now += 30.0
        assert recorder.step is None
        recorder.record_event('started', 'on a machine', host='a')
        attempt.begin(0)
        attempt.steps(4)
        attempt.save()
        recorder.record_event('saved', 'saved step 4')
        attempt.steps(2)
        recorder.set_outcome('finished', 'all steps are done', 0)
    ledger = read_goodput(tmp_path)
    assert ledger.seconds == pytest.approx(30 + 60 + 5)
    # Four devices at 90 dollars per hour cost one dollar every ten seconds.
    assert ledger.dollars == pytest.approx(ledger.seconds / 10)
    only = ledger.attempts[0]
    assert (only.start_step, only.step, only.saved_step, only.is_closed) == (0, 6, 4, True)
    events = read_events(tmp_path).lines
    assert kinds(tmp_path) == [(1, 'started', None), (1, 'saved', None), (1, 'finished', 0)]
    assert [event['step'] for event in events] == [None, 4, 6]
    reasons = [line['why'] for line in read_lines(tmp_path / 'goodput.jsonl').lines]
    assert reasons == ['beat', 'beat', 'saved', 'end'][-len(reasons) :]


def test_metrics_continue_across_attempts(tmp_path):
    attempt = Attempt(tmp_path, price=90.0)
    attempt.recorder.__enter__()
    attempt.begin(0)
    attempt.steps(4)
    attempt.save()
    attempt.steps(2)
    attempt.recorder._write('beat')
    # The attempt is killed here, which loses two steps.
    attempt = Attempt(tmp_path, price=90.0, pause=35.0)
    with attempt.recorder as recorder:
        assert recorder.attempt == 2
        assert recorder.previous_seconds == pytest.approx(65.0)
        attempt.now += 20.0
        attempt.begin(4)
        attempt.steps(2)
        metrics = recorder.metrics(6, 16)
        assert metrics['cost/hours'] * 3600 == pytest.approx(65 + 40)
        assert metrics['cost/dollars'] == pytest.approx(10.5)
        # Ten steps of ten seconds remain.
        assert metrics['perf/eta_seconds'] == pytest.approx(100.0)
        assert metrics['cost/projected_dollars'] == pytest.approx(20.5)
        # Six steps of ten seconds count, out of 140 s with the pause.
        assert metrics['goodput/fraction'] == pytest.approx(60 / 140)
        # The time of a save counts towards the remaining time.
        attempt.save()
        assert recorder.metrics(6, 16)['perf/eta_seconds'] == pytest.approx(125.0)
        assert 'perf/eta_seconds' not in recorder.metrics(6, None)
        recorder.set_outcome('finished', '', 0)
    assert read_goodput(tmp_path).fraction == pytest.approx(60 / 145)


def test_generated_rollouts_are_productive(tmp_path):
    attempt = Attempt(tmp_path)
    with attempt.recorder as recorder:
        attempt.begin(0)
        for category, seconds in (('rollout', 30.0), ('tool_wait', 15.0), ('reward_wait', 15.0)):
            with attempt.timeline.phase(category):
                attempt.now += seconds
        attempt.steps(4)
        attempt.save()
        assert recorder.metrics(4, 10)['goodput/fraction'] == pytest.approx(70 / 105)
        recorder.set_outcome('finished', '', 0)
    # The report has the same fraction.
    assert read_goodput(tmp_path).fraction == pytest.approx(70 / 105)


def test_rollback_reduces_goodput(tmp_path):
    attempt = Attempt(tmp_path)
    with attempt.recorder as recorder:
        attempt.begin(0)
        attempt.steps(4)
        attempt.save()
        attempt.steps(3)
        assert recorder.metrics(7, 10)['goodput/fraction'] == pytest.approx(70 / 75)
        recorder.record_rollback(4)
        attempt.begin(4)
        assert recorder.metrics(4, 10)['goodput/fraction'] == pytest.approx(40 / 75)
        assert 'cost/dollars' not in recorder.metrics(4, 10)
        attempt.steps(1)
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
    with contextlib.suppress(type(error)), Attempt(tmp_path).recorder as recorder:
        if alerted:
            recorder.record_alert('failed', 'message of the alert')
            recorder.record_event('storage', 'the upload failed')
        raise error
    last = read_events(tmp_path).lines[-1]
    assert (last['kind'], last['code']) == (kind, code)
    assert last['message'] == ('message of the alert' if alerted else message)
    assert last.get('alert', False) == alerted
    assert [name for _, name, _ in kinds(tmp_path)].count('failed') == 1


def test_error_after_the_outcome_is_the_final_event(tmp_path):
    with contextlib.suppress(OSError), Attempt(tmp_path).recorder as recorder:
        recorder.set_outcome('finished', 'all steps are done', 0)
        raise OSError('full')
    assert kinds(tmp_path) == [(1, 'failed', EXIT_FAILED)]


def test_alerts_are_events_and_divergence_is_the_final_one(tmp_path):
    with Attempt(tmp_path).recorder as recorder:
        recorder.record_alert('diverged', 'steps 3 to 9')
        recorder.record_alert('storage', 'the bucket does not respond')
    events = read_events(tmp_path).lines
    assert [(event['kind'], event['alert'], event.get('code')) for event in events] == [
        ('storage', True, None),
        ('diverged', True, EXIT_FAILED),
    ]


@pytest.mark.parametrize(
    ('code', 'expected'),
    [
        (EXIT_PREEMPTED, ('preempted', EXIT_PREEMPTED, 'process 1 exited', None)),
        (EXIT_FAILED, ('failed', EXIT_FAILED, 'a collective failed', True)),
    ],
)
def test_cause_of_a_collective_error_is_recorded_at_exit(tmp_path, code, expected):
    with contextlib.suppress(ValueError), Attempt(tmp_path, alone=False).recorder as recorder:
        recorder.record_alert('failed', 'a collective failed')
        raise ValueError('a collective failed')
    assert kinds(tmp_path) == []
    recorder.record_exit(code, 'process 1 exited')
    (last,) = read_events(tmp_path).lines
    assert (last['kind'], last['code'], last['message'], last.get('alert')) == expected
    # Bad input is an error of this process, so it is recorded at once.
    with contextlib.suppress(InputError), Attempt(tmp_path, alone=False).recorder:
        raise InputError('x.bin: is damaged')
    assert kinds(tmp_path)[1:] == [(2, 'failed', EXIT_BAD_INPUT)]


@pytest.mark.parametrize(('code', 'kind'), [(EXIT_PREEMPTED, 'preempted'), (EXIT_FAILED, 'failed')])
def test_immediate_exit_is_recorded(tmp_path, code, kind):
    recorder = Attempt(tmp_path).recorder
    recorder.__enter__()
    recorder.record_exit(code, 'process 3 exited')
    assert kinds(tmp_path) == [(1, kind, code)]
    assert read_goodput(tmp_path).attempts[0].is_closed
    # Later records are ignored.
    lines = (tmp_path / 'goodput.jsonl').read_text()
    recorder.record_save()
    recorder.__exit__(None, None, None)
    assert (tmp_path / 'goodput.jsonl').read_text() == lines


def test_other_processes_write_only_their_goodput_log(tmp_path):
    attempt = Attempt(tmp_path, process=3, price=90.0)
    with attempt.recorder as recorder:
        attempt.begin(0)
        recorder.record_event('saved', 'x')
        recorder.set_outcome('finished', '', 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ['goodput-3.jsonl']
    line = read_lines(tmp_path / 'goodput-3.jsonl').lines[-1]
    # The first process records the cost of all devices.
    assert (line['process'], line['dollars']) == (3, None)


def test_all_processes_use_the_attempt_of_the_first(tmp_path):
    recorder = RunRecorder(
        tmp_path,
        Timeline(),
        interval_seconds=0.0,
        num_devices=1,
        process=1,
        agree=lambda attempt: 7 if attempt == 1 else 0,
    )
    assert recorder.attempt == 7


def test_heartbeats_are_periodic_and_compacted(tmp_path, monkeypatch):
    monkeypatch.setattr(run_recorder, '_MAX_HEARTBEATS', 5)
    attempt = Attempt(tmp_path, beat_seconds=0.001)
    with attempt.recorder:
        attempt.begin(0)
        seen = set()
        while len(seen) < 30:
            attempt.now += 1.0
            time.sleep(0.002)
            seen.add(read_lines(tmp_path / 'goodput.jsonl').lines[-1]['time'])
        attempt.steps(1)
        attempt.save()
    lines = read_lines(tmp_path / 'goodput.jsonl').lines
    assert len(lines) < 15
    assert [line['why'] for line in lines if line['why'] != 'beat'] == ['saved', 'end']
    # The next attempt compacts the file.
    Attempt(tmp_path)
    assert [line['why'] for line in read_lines(tmp_path / 'goodput.jsonl').lines] == ['saved', 'end']


@pytest.fixture
def messages(monkeypatch):
    records = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, 'emit', lambda record: records.append(record.getMessage()))
    monkeypatch.setattr(logger, 'handlers', [handler])
    monkeypatch.setattr(logger, 'level', logging.INFO)
    logger._cache.clear()
    return records


@pytest.mark.parametrize('name', ['goodput.jsonl', 'events.jsonl'])
@pytest.mark.parametrize('content', ['nonsense\n', '{"a": 1}\n', '{"life": null}\n'])
def test_damaged_file_is_renamed_and_the_run_continues(tmp_path, messages, name, content):
    (tmp_path / name).write_text(content)
    with RunRecorder(tmp_path, Timeline(), interval_seconds=0.0, num_devices=1) as recorder:
        recorder.record_event('started', 'x')
    assert (tmp_path / f'{name}.damaged').read_text() == content
    assert kinds(tmp_path)[0] == (1, 'started', None)
    assert len(read_goodput(tmp_path).attempts) == 1
    assert [name in line and 'renamed it to' in line for line in messages] == [True]


def test_torn_line_is_skipped_and_reported(tmp_path, messages):
    with Attempt(tmp_path).recorder:
        pass
    with (tmp_path / 'goodput.jsonl').open('a') as file:
        file.write(json.dumps({'time': 1})[:-1])
    assert RunRecorder(tmp_path, Timeline(), interval_seconds=0.0, num_devices=1).attempt == 2
    assert messages == ['goodput.jsonl: skipped the incomplete last line']


def test_a_clock_that_is_set_changes_no_duration(tmp_path, monkeypatch):
    # Before the first attempt, after its second step, before the second attempt, and during it.
    offsets = iter([-1.7e9, 0.0, -7200.0, 3.2e8])
    offset = 0.0
    real = time.time

    def set_clock():
        nonlocal offset
        offset = next(offsets)
        monkeypatch.setattr(time, 'time', lambda: real() + offset)

    for number in range(2):
        set_clock()
        attempt = Attempt(tmp_path, price=90.0)
        attempt.timeline.start_time = time.time()
        with attempt.recorder as recorder:
            attempt.begin(2 * number)
            attempt.steps(1)
            set_clock()
            attempt.steps(1)
            metrics = recorder.metrics(attempt.step, 10)
            attempt.save()
    assert metrics['cost/dollars'] == pytest.approx(4 * 90 / 3600 * 45)
    assert metrics['goodput/fraction'] == pytest.approx(40 / 45, abs=0.02)
    log = read_goodput(tmp_path)
    assert log.seconds == pytest.approx(50, abs=2)
    assert log.totals['step'] == 40
    assert log.totals['idle'] < 2
