"""Tests the recorded environment: versions, the git checkout, and the command without secrets."""

import platform

import jax
import pytest

from maxlm.telemetry import environment
from maxlm.telemetry.environment import checkout, command, devices, result_changes, versions


def test_versions_match_this_process(tmp_path):
    found = versions(tmp_path / 'no driver')
    assert found['python'] == platform.python_version()
    assert found['jax'] == jax.__version__
    assert {'jaxlib', 'flax', 'optax', 'orbax', 'grain'} < set(found)
    assert 'cuda_driver' not in found


@pytest.mark.parametrize(
    ('text', 'version'),
    [
        ('NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n', '550.54.15'),
        ('NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n', '575.57.08'),
        ('something else\n', None),
    ],
)
def test_gpu_driver_version(tmp_path, text, version):
    (tmp_path / 'version').write_text(text)
    assert versions(tmp_path / 'version').get('cuda_driver') == version


def test_command_reproduces_the_run_without_secrets():
    words = ['--config=configs/tiny.py', '--config.data.path=https://me:password@example.org/x?signature=secret']
    public = ['--config=configs/tiny.py', '--config.data.path=https://example.org/x']
    assert command('grpo', words) == ['maxlm', 'grpo', *public]
    assert command('train')[:2] == ['maxlm', 'train']


def test_checkout_reports_commit_and_dirty_state(tmp_path, monkeypatch):
    # An installed copy is not a checkout, even inside another one.
    assert checkout(tmp_path) is None
    (tmp_path / '.git').mkdir()
    # git does not recognize this directory.
    assert checkout(tmp_path) is None
    outputs = {'rev-parse': 'abc123\n', 'status': ''}
    monkeypatch.setattr(environment, '_git', lambda directory, verb, *words: outputs[verb])
    assert checkout(tmp_path) == {'commit': 'abc123', 'dirty': False}
    outputs['status'] = ' M maxlm/train.py\n'
    assert checkout(tmp_path) == {'commit': 'abc123', 'dirty': True}


def test_devices_of_all_processes():
    assert devices() == {'kind': 'cpu', 'count': jax.device_count(), 'processes': 1, 'platform': 'cpu'}


def test_changes_of_versions_and_devices_are_found():
    before = {'versions': {'jaxlib': '0.10.2', 'python': '3.11.0', 'libtpu': '1'}, 'devices': {'kind': 'H100'}}
    now = {'versions': {'jaxlib': '0.12.0', 'python': '3.12.0'}, 'devices': {'kind': 'H200', 'count': 8}}
    # The version of Python does not change a step, and libtpu and the count are known only once.
    assert result_changes(before, now) == ['jaxlib 0.10.2 → 0.12.0', 'kind H100 → H200']
    assert result_changes(before, before) == []
    assert result_changes({'versions': None, 'devices': 'H100'}, now) == []
