"""Environments of a config: checks, examples, and the instances that are only created for them."""

import resource
import types

import pytest

from maxlm.config.sections.posttraining import GrpoConfig
from maxlm.errors import InputError
from maxlm.rl.environments.calls import allow_open_files
from maxlm.rl.environments.loading import load_environment, read_examples
from tests.user_modules import write_module

MODULE = '''
class Counted:
    """Counts its instances that are open."""

    open = 0

    def __init__(self, start):
        Counted.open += 1
        self.start = start

    async def examples(self, split):
        return [{'number': number} for number in range(self.start, self.start + 2)]

    async def reset(self, example, seed):
        return []

    def step(self, messages):
        return [], 0.0, True

    def score(self, trajectory):
        return {}

    async def close(self):
        Counted.open -= 1


class Unfinished(Counted):
    step = None


class Broken(Counted):
    async def examples(self, split):
        raise ValueError('no data')
'''


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Returns a function that loads a class of the module, and returns the class and the function that creates it."""
    module = write_module(tmp_path, monkeypatch, MODULE)

    def load(name, arguments='{"start": 3}'):
        create = load_environment(GrpoConfig(environment=f'{module}:{name}', environment_args=arguments))
        return __import__(module).Counted, create

    load.module = module
    return load


def test_examples_may_be_async_and_no_instance_stays_open(load):
    counted, create = load('Counted')
    assert counted.open == 0
    assert read_examples('', create, split='train', key='grpo.prompts') == ([{'number': 3}, {'number': 4}], [1, 2])
    assert counted.open == 0
    # Negative control: an instance that is not closed counts.
    create()
    assert counted.open == 1


def test_failures_leave_no_instance_open(load):
    counted, create = load('Broken')
    with pytest.raises(InputError, match=r'environment Broken.examples: failed with ValueError: no data'):
        read_examples('', create, split='train', key='grpo.prompts')
    with pytest.raises(InputError, match=r'Unfinished has no method step\(messages\); define it'):
        load('Unfinished')
    assert counted.open == 0


def test_missing_arguments_of_the_constructor_are_one_line(load):
    with pytest.raises(InputError, match=r"must accept the arguments \(\): missing a required argument: 'start'"):
        load('Counted', '')


@pytest.mark.parametrize(
    ('limits', 'expected'),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 2**30), (2**17, 2**30)),
        ((1024, resource.RLIM_INFINITY), (2**17, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        ((2**20, 2**20), None),
    ],
)
def test_the_limit_of_open_files_rises(monkeypatch, limits, expected):
    found = []
    monkeypatch.setattr(
        'maxlm.rl.environments.calls.resource',
        types.SimpleNamespace(
            RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
            RLIM_INFINITY=resource.RLIM_INFINITY,
            getrlimit=lambda _: limits,
            setrlimit=lambda _, values: found.append(values),
        ),
    )
    allow_open_files()
    assert found == ([expected] if expected else [])
