"""Tests the number of tokens decoded per call."""

import pytest

from maxlm.inference.engine.decode_burst import MAX_BURST_SECONDS, SHORT_BURST, DecodeBurst


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def measured_burst(seconds, *, most=8, calls=1, pass_tokens=1):
    """Returns a `DecodeBurst` that has measured `calls` calls of two passes of `seconds` each, and its clock."""
    clock = Clock()
    burst = DecodeBurst(most, pass_tokens, clock)
    assert burst.num_tokens([50, 60], has_prefill=False) == 1
    for _ in range(calls):
        start = burst.now()
        clock.now += 2 * seconds
        burst.record(start, 2)
    return burst, clock


def test_a_call_takes_at_most_the_maximum_time():
    assert measured_burst(0.001)[0].num_tokens([50, 60], has_prefill=False) == 8
    assert measured_burst(MAX_BURST_SECONDS / 3.5)[0].num_tokens([50, 60], has_prefill=False) == 3
    assert measured_burst(10)[0].num_tokens([50, 60], has_prefill=False) == 1


def test_a_call_has_tokens_for_the_drafts_of_one_pass():
    burst, _ = measured_burst(10, pass_tokens=5)
    assert [burst.num_tokens([50, 60], has_prefill=is_next) for is_next in (False, True)] == [5, 1]
    assert burst.num_tokens([3, 60], has_prefill=False) == 3


def test_a_waiting_prompt_shortens_the_call():
    burst, _ = measured_burst(0.001)
    assert [burst.num_tokens([50], has_prefill=is_next) for is_next in (True, False)] == [1, 8]


def test_a_call_ends_with_the_first_sample_and_the_next_is_short():
    burst, _ = measured_burst(0.001)
    assert [burst.num_tokens(left, has_prefill=False) for left in ([5, 40], [35], [33], [25, 1], [24])] == [
        5,
        SHORT_BURST,
        8,
        1,
        SHORT_BURST,
    ]


def test_time_before_a_call_does_not_count():
    """A device runs calls in sequence: a call dispatched early starts when the previous call ends."""
    burst, clock = measured_burst(0.01)
    # Before the first call, the device runs another call or a prompt.
    for seconds, passes in ((0.02, 2), (5, 0)):
        first, second = burst.now(), burst.now()
        clock.now += seconds
        burst.record(first, passes)
        clock.now += 0.02
        burst.record(second, 2)
        assert burst.num_tokens([50], has_prefill=False) == int(MAX_BURST_SECONDS / 0.01)


@pytest.mark.parametrize('calls', [1, 30])
def test_changed_times_are_followed(calls):
    burst, clock = measured_burst(0.001)
    for _ in range(calls):
        start = burst.now()
        clock.now += 0.05
        burst.record(start, 1)
    assert (burst.num_tokens([50], has_prefill=False) == 1) == (calls > 1)


def test_rows_with_few_tokens_wait_for_rows_with_many():
    burst = DecodeBurst(8)
    assert burst.num_grammar_tokens([1]) == 1
    assert burst.num_grammar_tokens([5]) == 5
    # Seven rows of eight tokens outweigh one that waits, and the other way round.
    assert burst.num_grammar_tokens([1, *[8] * 7]) == 8
    assert burst.num_grammar_tokens([8, *[1] * 7]) == 1
