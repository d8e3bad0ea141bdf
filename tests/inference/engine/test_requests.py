"""Tests the validation of request parameters."""

import pytest

from maxlm.errors import InputError
from maxlm.inference.engine.requests import Request


@pytest.mark.parametrize(
    ('settings', 'fragments'),
    [
        ({'prompt': ()}, 'the prompt is empty; provide at least one character'),
        ({'max_tokens': 0}, 'max_tokens=0: must be at least 1'),
        ({'seed': -1}, 'seed=-1: must be at least 0'),
        ({'seed': 2**32}, 'seed=4294967296'),
        ({'seed': 1.5}, 'seed=1.5: must be an integer'),
        ({'num_samples': 0}, 'num_samples=0: must be from 1 to 128'),
        ({'num_samples': 129}, 'num_samples=129'),
        ({'stops': ('',)}, 'stops: must be at most 16 non-empty strings'),
        ({'stops': ('x',) * 17}, 'stops: must be at most 16'),
        ({'top_log_probs': 21}, 'top_log_probs=21: must be from 0 to 20'),
        ({'top_log_probs': -1}, 'top_log_probs=-1'),
        ({'embed': True}, 'embed: requires max_tokens=0'),
        ({'embed': True, 'max_tokens': 0, 'num_samples': 2}, 'embed: requires max_tokens=0'),
    ],
)
def test_values_out_of_range(settings, fragments):
    with pytest.raises(InputError, match='^' + fragments.split('²')[0]):
        Request(**{'prompt': (1,), 'max_tokens': 5, **settings})


def test_values_in_range():
    request = Request((1,), 1, seed=2**32 - 1, num_samples=128, stops=('x',) * 16, top_log_probs=20)
    assert request.top_log_probs == 20
