"""Provides the fake programs as a fixture."""

import pytest

from tests.launch.programs import Programs


@pytest.fixture
def programs(tmp_path):
    return Programs(tmp_path / 'stand_ins')
