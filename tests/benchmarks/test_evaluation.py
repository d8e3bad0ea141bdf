"""Tests the comparison of lm-eval's two backends, with fakes for both."""

import math

import pytest

from benchmarks import evaluation
from benchmarks.evaluation import Task, Turn
from maxlm.errors import InputError

CHOICES = Task('choices', False, [('a', ' b'), ('a', ' c')])
TEXTS = Task('texts', True, [('a b c',)])


class Side:
    """Fake backend that takes given seconds per turn. The first turn is the warm-up."""

    def __init__(self, seconds, log_probs=(-2.0, -3000.0), greedy=(True, False)):
        self.seconds, self.log_probs, self.greedy, self.asked = seconds, log_probs, greedy, []

    def __call__(self, task, batch=None):
        self.asked.append((task.name, batch))
        turn = sum(name == task.name and size == batch for name, size in self.asked) - 1
        taken = self.seconds[batch][turn] if batch else self.seconds[turn]
        num = len(task.requests)
        return Turn(taken, list(self.log_probs[:num]), [] if task.rolling else list(self.greedy[:num]))


def peer(**answers):
    return Side({1: [9.0] * 4, 8: [0.1, 4.0, 6.0, 5.0], 16: [9.0, 1.0, 7.0, 8.0]}, **answers)


def test_batch_size_with_the_best_median_is_compared():
    ours, theirs = Side([100.0, 2.0, 1.0, 30.0]), peer()
    choices, texts = evaluation.measure(ours, theirs, [CHOICES, TEXTS], 3)
    for result in (choices, texts):
        # The warm-up does not count, and neither does the fastest turn of a batch size that is slow otherwise.
        assert (result['maxlm'], result['hf'], result['hf_batch'], result['ratio']) == (2.0, 5.0, 8, 2.5)
        assert result['turns'] == {
            'maxlm': [2.0, 1.0, 30.0],
            '1': [9.0] * 3,
            '8': [4.0, 6.0, 5.0],
            '16': [1.0, 7.0, 8.0],
        }
    assert (choices['requests'], texts['requests']) == (2, 1)
    assert theirs.asked[:6] == [(name, size) for name in ('choices', 'texts') for size in (1, 8, 16)]
    assert evaluation.table([choices])[2:] == ['| choices | 2.00 | 5.00 (batch 8) | 2.50 |']


def test_rounding_differences_are_allowed():
    theirs = peer(log_probs=(-2.0005, -3001.0))
    (result,) = evaluation.measure(Side([1.0] * 2), theirs, [CHOICES], 1)
    assert result['difference'] == pytest.approx(1 / 3001)


@pytest.mark.parametrize(
    ('answers', 'message'),
    [
        ({'log_probs': (-2.01, -3000.0)}, 'differ by 5.0e-03'),
        ({'log_probs': (-2.0, math.nan)}, 'differ by nan'),
        ({'log_probs': (-2.0,)}, '2 and 1 answers'),
        ({'greedy': (False, False)}, 'other tokens are the likeliest'),
    ],
)
def test_another_model_is_not_compared(answers, message):
    with pytest.raises(SystemExit, match=message):
        evaluation.measure(Side([1.0] * 2), peer(**answers), [CHOICES], 1)


def test_numbers_of_documents():
    assert evaluation.parse_documents('40,16,8') == [40, 16, 8]
    for text in ('40', '40,16', 'a,16,8', '0,16,8', '40,5,8'):
        with pytest.raises(InputError, match='--documents='):
            evaluation.parse_documents(text)
