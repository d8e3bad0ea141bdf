"""Membership of elastic runs: liveness by heartbeats, and the decisions of each host. Time passes in ticks."""

import pytest

from maxlm.supervision.membership import (
    DONE,
    LEFT,
    LOST_TICKS,
    NO_GENERATION,
    PAUSED,
    QUARANTINED,
    READY,
    RUNNING,
    START_TICKS,
    Generation,
    Hosts,
    HostState,
    next_generation,
    reason_to_stop,
)

COUNTS = (1, 2, 3)
FIRST = Generation(1, ('a', 'b', 'c'), 'a:1')


def state_of(token, state, beat):
    return HostState(token, f'host-{token}', f'{token}:1', state, beat)


def observed(ticks, *, own='a', silent='', **states):
    """Returns the hosts after a number of ticks. Those in `silent` have sent no heartbeat since the first tick."""
    hosts = Hosts(own)
    for tick in range(ticks):
        hosts.update(state_of(token, state, 0 if token in silent else tick) for token, state in states.items())
    return hosts


def test_a_host_is_alive_while_it_sends_heartbeats():
    assert set(observed(1, a=READY, b=READY).alive()) == {'a'}
    assert set(observed(2, a=READY, b=READY).alive()) == {'a', 'b'}
    hosts = observed(2, a=READY, b=READY)
    for tick in range(LOST_TICKS):
        hosts.update([state_of('a', READY, tick)])
    assert (set(hosts.alive()), hosts.loss('b')) == ({'a', 'b'}, '')
    hosts.update([state_of('a', READY, -1)])
    assert (set(hosts.alive()), hosts.loss('b')) == ({'a'}, 'host-b sent no heartbeat')
    # A heartbeat after a suspension.
    hosts.update([state_of('b', READY, 99)])
    assert (set(hosts.alive()), hosts.loss('b')) == ({'a', 'b'}, '')


def test_a_host_of_an_earlier_start_is_never_alive():
    for ticks, loss in ((LOST_TICKS, ''), (LOST_TICKS + 2, 'host-b sent no heartbeat')):
        hosts = observed(ticks, silent='b', a=READY, b=RUNNING)
        assert (set(hosts.alive()), hosts.loss('b')) == ({'a'}, loss)
    # The file of a host may have been removed.
    assert observed(LOST_TICKS, a=READY).loss('b') == ''
    assert observed(LOST_TICKS + 1, a=READY).loss('b') == 'b sent no heartbeat'
    # A host that completed the run earlier does not complete this one.
    generation = Generation(4, ('b',), 'b:1')
    assert not observed(3, silent='b', a=READY, b=DONE).is_done(generation)
    assert observed(3, a=READY, b=DONE).is_done(generation)
    assert not observed(3, a=READY, b=LEFT).is_done(generation)


@pytest.mark.parametrize(
    ('own', 'states', 'newest', 'counts', 'waited', 'expected'),
    [
        # A new run starts with all hosts, in the order of their names.
        ('a', {'c': READY, 'b': READY, 'a': READY}, NO_GENERATION, COUNTS, 0, ('a', 'b', 'c')),
        ('b', {'c': READY, 'b': READY, 'a': READY}, NO_GENERATION, COUNTS, 0, None),
        # Otherwise it waits, and starts with those that came.
        ('a', {'a': READY, 'b': READY}, NO_GENERATION, COUNTS, START_TICKS - 1, None),
        ('a', {'a': READY, 'b': READY}, NO_GENERATION, COUNTS, START_TICKS, ('a', 'b')),
        ('a', {'a': READY, 'b': READY}, NO_GENERATION, (3,), START_TICKS, None),
        # After a loss of rank 0, the others keep their order and do not wait.
        ('b', {'a': LEFT, 'b': READY, 'c': READY}, FIRST, COUNTS, 0, ('b', 'c')),
        ('c', {'a': LEFT, 'b': READY, 'c': READY}, FIRST, COUNTS, 0, None),
        ('b', {'a': QUARANTINED, 'b': READY, 'c': READY}, FIRST, COUNTS, 0, ('b', 'c')),
        ('c', {'a': LEFT, 'b': READY, 'c': READY}, Generation(2, ('c', 'b'), ''), COUNTS, 0, ('c', 'b')),
        # Negative control: a fixed number of hosts waits forever.
        ('b', {'a': LEFT, 'b': READY, 'c': READY}, FIRST, (3,), START_TICKS, None),
        # The largest allowed number; the last host waits.
        ('b', {'a': LEFT, 'b': READY, 'c': READY}, FIRST, (1, 3), 0, ('b',)),
        # New hosts follow the members.
        ('b', {'0': READY, 'b': READY, 'c': READY, 'a': LEFT}, FIRST, COUNTS, 0, ('b', 'c', '0')),
        ('0', {'0': READY, 'b': READY, 'c': READY, 'a': LEFT}, FIRST, COUNTS, 0, None),
        # A member that still runs or pauses is waited for.
        ('a', {'a': READY, 'b': RUNNING, 'c': READY}, FIRST, COUNTS, START_TICKS, None),
        ('a', {'a': READY, 'b': PAUSED, 'c': READY}, FIRST, COUNTS, START_TICKS, None),
        # All hosts have restarted.
        ('d', {'a': LEFT, 'b': LEFT, 'c': LEFT, 'd': READY, 'e': READY}, FIRST, (1, 2), 0, ('d', 'e')),
    ],
)
def test_next_generation(own, states, newest, counts, waited, expected):
    found = next_generation(observed(3, own=own, **states), own, newest, counts, waited)
    if expected is None:
        assert found is None
    else:
        assert found == Generation(newest.number + 1, expected, f'{own}:1')


def test_a_member_counts_as_lost_only_after_the_timeout():
    states = {'a': READY, 'b': READY, 'c': RUNNING}
    for ticks, expected in ((LOST_TICKS, None), (LOST_TICKS + 2, ('a', 'b'))):
        found = next_generation(observed(ticks, silent='c', **states), 'a', FIRST, COUNTS, 0)
        assert (found.hosts if found else None) == expected


@pytest.mark.parametrize(
    ('states', 'newest', 'counts', 'age', 'expected'),
    [
        ({'a': RUNNING, 'b': RUNNING, 'c': RUNNING}, FIRST, COUNTS, 99, ''),
        ({'a': RUNNING, 'b': RUNNING, 'c': LEFT}, FIRST, COUNTS, 0, 'host-c left'),
        ({'a': RUNNING, 'b': RUNNING, 'c': QUARANTINED}, FIRST, COUNTS, 0, 'host-c is quarantined'),
        ({'a': RUNNING, 'b': READY, 'c': RUNNING}, FIRST, COUNTS, 0, ''),
        # The commands of the other hosts also end soon.
        ({'a': RUNNING, 'b': RUNNING, 'c': DONE}, FIRST, COUNTS, 0, ''),
        # The other hosts regarded this one as lost.
        (
            {'a': RUNNING, 'b': RUNNING, 'c': RUNNING},
            Generation(2, ('b', 'c'), ''),
            COUNTS,
            0,
            'generation 2 has started without this host',
        ),
        # A new host joins if its number is allowed, and not soon after a start.
        ({'a': RUNNING, 'b': RUNNING, 'c': RUNNING, 'd': READY}, FIRST, (2, 3, 4), LOST_TICKS, 'host-d joined'),
        ({'a': RUNNING, 'b': RUNNING, 'c': RUNNING, 'd': READY}, FIRST, (2, 3, 4), LOST_TICKS - 1, ''),
        ({'a': RUNNING, 'b': RUNNING, 'c': RUNNING, 'd': READY}, FIRST, (1, 3, 5), LOST_TICKS, ''),
        ({'a': RUNNING, 'b': RUNNING, 'c': RUNNING, 'd': PAUSED}, FIRST, (2, 3, 4), LOST_TICKS, ''),
    ],
)
def test_reason_to_stop(states, newest, counts, age, expected):
    assert reason_to_stop(observed(3, **states), FIRST, newest, counts, age) == expected


def test_a_silent_member_stops_the_command():
    states = {'a': RUNNING, 'b': RUNNING, 'c': RUNNING}
    for ticks, expected in ((LOST_TICKS, ''), (LOST_TICKS + 2, 'host-c sent no heartbeat')):
        assert reason_to_stop(observed(ticks, silent='c', **states), FIRST, FIRST, COUNTS, 0) == expected
