"""Tests the number of tokens decoded per call."""

import pytest

from maxlm.inference.engine.decode_burst import MAX_BURST_SECONDS, SHORT_BURST, DecodeBurst


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def paced(seconds, *, most=8, calls=1):
    """Returns a `DecodeBurst` that has measured `calls` calls of two passes of `seconds` each, and its clock."""
    clock = Clock()
    pace = DecodeBurst(most, clock)
    assert pace.num_passes([50, 60], has_prefill=False) == 1
    for _ in range(calls):
        asked = pace.now()
        clock.now += 2 * seconds
        pace.record(asked, 2)
    return pace, clock


def test_a_call_is_as_long_as_the_host_may_be_away():
    assert paced(0.001)[0].num_passes([50, 60], has_prefill=False) == 8
    assert paced(MAX_BURST_SECONDS / 3.5)[0].num_passes([50, 60], has_prefill=False) == 3
    assert paced(10)[0].num_passes([50, 60], has_prefill=False) == 1


def test_a_prompt_comes_soon():
    pace, _ = paced(0.001)
    assert [pace.num_passes([50], has_prefill=is_next) for is_next in (True, False)] == [1, 8]


def test_a_call_ends_with_the_first_sample_and_the_next_is_short():
    pace, _ = paced(0.001)
    assert [pace.num_passes(left, has_prefill=False) for left in ([5, 40], [35], [33], [25, 1], [24])] == [
        5,
        SHORT_BURST,
        8,
        1,
        SHORT_BURST,
    ]


def test_time_before_a_call_does_not_count():
    """A device runs calls in sequence: a call dispatched early starts when the previous call ends."""
    pace, clock = paced(0.01)
    # Before the first call, the device runs another call or a prompt.
    for seconds, passes in ((0.02, 2), (5, 0)):
        first, second = pace.now(), pace.now()
        clock.now += seconds
        pace.record(first, passes)
        clock.now += 0.02
        pace.record(second, 2)
        assert pace.num_passes([50], has_prefill=False) == int(MAX_BURST_SECONDS / 0.01)


@pytest.mark.parametrize('calls', [1, 30])
def test_times_that_change_are_followed(calls):
    pace, clock = paced(0.001)
    for _ in range(calls):
        asked = pace.now()
        clock.now += 0.05
        pace.record(asked, 1)
    assert (pace.num_passes([50], has_prefill=False) == 1) == (calls > 1)
