"""State of a run, derived from its workdir and the age of its last heartbeat."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from maxlm.storage.filesystem import is_url
from maxlm.storage.json_fields import number, text
from maxlm.telemetry.run_history import RunHistory

# States shown to users.
EMPTY, STARTING, RUNNING, STALLED = 'no run yet', 'starting', 'running', 'stalled'
PREEMPTED, CRASHED, DIVERGED, FINISHED = 'preempted', 'crashed', 'diverged', 'finished'
# Kinds of the last event of an attempt.
END_STATES = {'finished': FINISHED, 'preempted': PREEMPTED, 'failed': CRASHED, 'diverged': DIVERGED}
# A run is stalled after this number of step times without a step, but not before this number of seconds.
STALL_STEPS = 20
STALL_SECONDS = 60.0
# A run is not stalled before this many intervals between lines have passed.
STALL_LINES = 3
# Additional delay of a workdir in a bucket.
MIRROR_SECONDS = 120.0
# Kinds of events that show progress.
PROGRESS = frozenset(
    {'started', 'resumed', 'compiled', 'evaluated', 'saved', 'context', 'length', 'export', 'exported'}
)
# Phases in which no step is expected, regardless of their duration.
WITHOUT_STEPS = frozenset({'start', 'compile', 'rollout', 'evaluation', 'checkpoint', 'restore'})


class RunStatus(NamedTuple):
    """State of a run.

    Attributes:
        state: one of the states above.
        reason: one line, or '' if the state needs no explanation.
        last_heartbeat: time of the newest line of any process; None if there is none.
    """

    state: str
    reason: str
    last_heartbeat: float | None


def run_status(history: RunHistory, now: float) -> RunStatus:
    """Returns the state of a run at the time `now`, in seconds since 1970."""
    heartbeat_time = last_heartbeat(history)
    if not history.has_started and not history.alive:
        return RunStatus(EMPTY, 'no run has started in this workdir', heartbeat_time)
    if end_event := _end_event(history):
        return RunStatus(END_STATES[end_event['kind']], str(end_event.get('message', '')), heartbeat_time)
    if history.alive is False:
        return RunStatus(CRASHED, 'the process exited without writing a final event', heartbeat_time)
    heartbeats = history.heartbeats.get(0, [])
    has_stepped = _has_stepped(history)
    status = RunStatus(RUNNING if has_stepped else STARTING, '', heartbeat_time)
    if heartbeat_time is None:
        return status
    timeout = _stall_timeout(history)
    if now - heartbeat_time > timeout:
        return RunStatus(STALLED, f'no heartbeat for {now - heartbeat_time:.0f} s', heartbeat_time)
    progress = _last_progress(history)
    phase = _current_phase(heartbeats)
    if has_stepped and progress is not None and phase not in WITHOUT_STEPS and now - progress > timeout:
        at = f' (current phase: {phase.replace("_", " ")})' if phase else ''
        return RunStatus(STALLED, f'no step for {now - progress:.0f} s{at}', heartbeat_time)
    return status


def last_heartbeat(history: RunHistory) -> float | None:
    """Returns the time of the newest line that any process of a run wrote, or None."""
    files = [history.metrics, history.events, *history.heartbeats.values(), *history.devices.values()]
    return max((time for lines in files for line in lines[-1:] if (time := number(line, 'time'))), default=None)


def _end_event(history: RunHistory) -> dict[str, Any] | None:
    """Returns the last event of the newest attempt, or None if it has not ended or wrote none."""
    attempt = max((number(heartbeats[-1], 'life') or 0 for heartbeats in history.heartbeats.values()), default=0)
    for event in reversed(history.events):
        # The first line of an attempt's goodput log precedes its first event.
        if text(event, 'kind') == 'started' or (number(event, 'life') or attempt) < attempt:
            return None
        if text(event, 'kind') in END_STATES:
            return event
    return None


def _has_stepped(history: RunHistory) -> bool:
    """Returns True if the newest attempt has finished a step."""
    heartbeats = history.heartbeats.get(0)
    if not heartbeats:
        return bool(history.metrics)
    own = [heartbeat for heartbeat in heartbeats if heartbeat.get('life') == heartbeats[-1].get('life')]
    if any(number(heartbeat, 'step') not in (None, number(heartbeat, 'start_step')) for heartbeat in own):
        return True
    began = number(own[0], 'began') or 0.0
    return any((number(line, 'time') or 0.0) > began for line in history.metrics[-1:])


def _stall_timeout(history: RunHistory) -> float:
    """Returns the seconds without a heartbeat or step after which a run is stalled."""
    steps = (number(line, 'perf/step_time_seconds') for line in reversed(history.metrics))
    step_seconds = next((seconds for seconds in steps if seconds), 0.0)
    timeout = max(STALL_SECONDS, STALL_STEPS * step_seconds)
    # Measure the interval, because the config may be missing or of another version.
    times = [number(line, 'time') for line in (history.heartbeats.get(0) or history.metrics)[-2:]]
    if len(times) == 2 and times[0] and times[1]:
        timeout = max(timeout, STALL_LINES * (times[1] - times[0]))
    return timeout + (MIRROR_SECONDS if is_url(history.workdir) else 0.0)


def _last_progress(history: RunHistory) -> float | None:
    """Returns the time of the last sign of progress."""
    events = [event for event in history.events if text(event, 'kind') in PROGRESS]
    times = [number(line, 'time') for line in (*history.metrics[-1:], *events[-1:])]
    heartbeats = history.heartbeats.get(0, [])
    times += [
        number(heartbeat, 'time')
        for old, heartbeat in itertools.pairwise(heartbeats)
        if heartbeat.get('step') != old.get('step')
    ]
    return max((time for time in times if time), default=None)


def _current_phase(heartbeats: list[dict[str, Any]]) -> str:
    """Returns the category with the most time between the last two heartbeats, or '' if unknown."""
    if len(heartbeats) < 2 or heartbeats[-1].get('life') != heartbeats[-2].get('life'):
        return ''
    before, after = (heartbeat.get('seconds') for heartbeat in heartbeats[-2:])
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ''
    deltas = {name: (number(after, name) or 0.0) - (number(before, name) or 0.0) for name in after}
    return max(deltas, key=lambda name: deltas[name], default='')
