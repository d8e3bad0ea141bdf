"""Tests the choice of a slot for a prompt and the reuse of its contents."""

import math

import numpy as np

from maxlm.inference.engine.slots import MIN_SHARED_TOKENS, SHRINK_AFTER_PASSES, CacheLength, Slot, choose_slot

PROMPT = np.arange(100, 140)


def slot(number, content, *, busy=False, used=0, written=None):
    made = Slot(number)
    made.content, made.last_used = list(content), used
    made.num_written = len(made.content) if written is None else written
    made.sample = object() if busy else None
    return made


def choose(slots, prompt=PROMPT, slack=math.inf, counts=(4,), salt=''):
    target, source, shared = choose_slot(slots, prompt, slack=slack, row_counts=counts, salt=salt)
    return target.number, source.number, shared


def test_shared_tokens_of_a_slot():
    assert slot(0, [100, 101, 5]).num_shared(PROMPT) == 2
    assert slot(0, range(100, 200)).num_shared(PROMPT) == 40
    assert slot(0, []).num_shared(PROMPT) == 0


def test_only_slots_with_the_same_salt_are_reused():
    slots = [slot(0, range(100, 120)), slot(1, range(100, 130), busy=True), slot(2, [])]
    slots[0].salt, slots[1].salt = 'a', 'b'
    assert [choose(slots, salt=salt)[1:] for salt in ('a', 'b', '')] == [(0, 20), (1, 30), (0, 0)]


def test_the_longest_prefix_is_reused():
    slots = [slot(0, range(100, 120)), slot(1, range(100, 130), busy=True), slot(2, [], used=3)]
    # The prefix is copied from a busy slot into the least recently used idle slot.
    assert choose(slots) == (0, 1, 30)
    # The slot is reused in place because all of its contents are useful.
    assert choose(slots[::2]) == (0, 0, 20)
    # A short shared prefix does not justify overwriting long contents, unless no other slot is free.
    long = slot(0, [*range(100, 120), *range(60)], used=9)
    assert choose([long, slot(1, [], used=5)]) == (1, 0, 20)
    assert choose([long, slot(1, [], busy=True)]) == (0, 0, 20)


def test_the_last_token_always_goes_through_the_model():
    assert choose([slot(0, range(100, 140))]) == (0, 0, 39)


def test_short_prefixes_are_not_reused():
    assert choose([slot(0, range(100, 100 + MIN_SHARED_TOKENS))]) == (0, 0, MIN_SHARED_TOKENS)
    assert choose([slot(0, range(100, 99 + MIN_SHARED_TOKENS))]) == (0, 0, 0)
    # The least recently used free slot is chosen.
    slots = [slot(0, [], busy=True), slot(1, range(9), used=4), slot(2, range(9), used=2), slot(3, [], used=3)]
    assert choose(slots) == (2, 2, 0)


def test_few_slots_are_served_together():
    slots = [slot(number, [], used=10 - number, busy=number < 2) for number in range(6)]
    assert choose(slots, counts=(6,))[0] == 5
    assert choose(slots, counts=(4, 6))[0] == 3
    assert choose(slots, counts=(1, 2, 3, 6))[0] == 2
    # The slot of a continuing conversation is chosen regardless of its number.
    slots[5].content = list(range(100, 130))
    assert choose(slots, counts=(4, 6)) == (5, 5, 30)


def test_a_ring_that_wrapped_around_has_lost_the_prefix():
    slots = [slot(0, range(100, 120), written=50)]
    assert choose(slots, slack=30) == (0, 0, 20)
    assert choose(slots, slack=29) == (0, 0, 0)


def test_cache_length_grows_at_once_and_shrinks_late():
    cache_length = CacheLength([16, 64, 256])
    assert cache_length.size == 16
    for length, size in ((16, 16), (17, 64), (200, 256)):
        cache_length.size = cache_length.fit(length, 8)
        assert cache_length.size == size
    assert cache_length.fit(10, SHRINK_AFTER_PASSES) == 256
    # A longer text resets the countdown to shrinking.
    assert cache_length.fit(65, 1) == 256
    assert cache_length.fit(64, SHRINK_AFTER_PASSES) == 256
    assert cache_length.fit(17, 1) == 64
