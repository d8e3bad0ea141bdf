"""How many tokens a call draws."""

import pytest

from maxlm.inference.engine.decode_burst import LONGEST_CALL, SHORT, DecodeBurst


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def paced(seconds, *, most=8, calls=1):
    """A pace that has seen passes of so many seconds."""
    clock = Clock()
    pace = DecodeBurst(most, clock)
    assert pace.passes([50, 60], is_next=False) == 1
    for _ in range(calls):
        asked = pace.now()
        clock.now += 2 * seconds
        pace.came(asked, 2)
    return pace, clock


def test_a_call_is_as_long_as_the_host_may_be_away():
    assert paced(0.001)[0].passes([50, 60], is_next=False) == 8
    assert paced(LONGEST_CALL / 3.5)[0].passes([50, 60], is_next=False) == 3
    assert paced(10)[0].passes([50, 60], is_next=False) == 1


def test_a_prompt_comes_soon():
    pace, _ = paced(0.001)
    assert [pace.passes([50], is_next=is_next) for is_next in (True, False)] == [1, 8]


def test_a_call_ends_with_the_first_sample_and_the_next_is_short():
    pace, _ = paced(0.001)
    assert [pace.passes(left, is_next=False) for left in ([5, 40], [35], [33], [25, 1], [24])] == [
        5,
        SHORT,
        8,
        1,
        SHORT,
    ]


def test_time_before_a_call_does_not_count():
    """Devices do one thing after the other: a call that was asked for early began when the one before ended."""
    pace, clock = paced(0.01)
    # Before it another call, or a prompt.
    for seconds, passes in ((0.02, 2), (5, 0)):
        first, second = pace.now(), pace.now()
        clock.now += seconds
        pace.came(first, passes)
        clock.now += 0.02
        pace.came(second, 2)
        assert pace.passes([50], is_next=False) == int(LONGEST_CALL / 0.01)


@pytest.mark.parametrize('calls', [1, 30])
def test_times_that_change_are_followed(calls):
    pace, clock = paced(0.001)
    for _ in range(calls):
        asked = pace.now()
        clock.now += 0.05
        pace.came(asked, 1)
    assert (pace.passes([50], is_next=False) == 1) == (calls > 1)
