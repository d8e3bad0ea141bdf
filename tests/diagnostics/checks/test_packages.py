"""Tests installed packages against the requirements in pyproject.toml."""

import dataclasses
import importlib.metadata

import pytest

from maxlm.diagnostics.checks import packages
from maxlm.diagnostics.checks.packages import evaluate_packages, evaluate_python, needed_extras, read_requirements
from maxlm.diagnostics.result import CheckStatus
from maxlm.errors import InputError
from maxlm.installation import pip_install
from tests.diagnostics.machines import CPU, TPU, case_on, gpus
from tests.small import small_config

WANTED = read_requirements()
# All required packages are installed, without any extra.
INSTALLED = {'jax': '0.10.2', 'jaxlib': '0.10.2', 'plotext': '5.3.2'}


def version_of(**changes):
    changes = {name.replace('_', '-'): version for name, version in changes.items()}
    return lambda name: changes[name] if name in changes else INSTALLED.get(name, '9999')


@pytest.mark.parametrize(
    ('version', 'status'), [((3, 10, 14), 'failure'), ((3, 11, 7), 'ok'), ((3, 12, 0), 'ok'), ((3, 99, 0), 'warning')]
)
def test_python(version, status):
    assert evaluate_python(WANTED, version).status == status


def test_all_packages_are_installed():
    found = evaluate_packages(WANTED, {}, version_of(jax_cuda12_plugin=None, jax_cuda13_plugin=None))
    assert found.status is CheckStatus.OK
    assert 'jax 0.10.2' in found.message


def test_missing_and_old_packages_are_named():
    plain = {'jax_cuda12_plugin': None, 'jax_cuda13_plugin': None}
    found = evaluate_packages(WANTED, {}, version_of(grain=None, jax='0.4.30', **plain))
    assert found.status is CheckStatus.FAILURE
    assert 'grain is missing' in found.message
    assert 'jax 0.4.30, but >=0.10.2 is needed' in found.message
    assert 'optax' not in found.message


def test_extras_of_the_run_and_the_machine():
    config = small_config(data__path='s3://me:secret@bucket/data', checkpoint__remote_dir='gs://bucket/run')
    extras = needed_extras(case_on(TPU, config=config, workdir='runs/x'))
    assert extras == {'gcs': 'gs://bucket/run', 's3': 's3://bucket/data', 'tpu': '4 TPU chips'}
    assert needed_extras(case_on(CPU, config=small_config(), workdir='runs/x')) == {}
    assert needed_extras(case_on(CPU, config=small_config(metrics__wandb='online'))) == {'wandb': 'metrics.wandb'}
    assert needed_extras(case_on(CPU, config=small_config(data__path='hf:org/name'))) == {'hub': 'hf:org/name'}


@pytest.mark.parametrize(
    ('driver', 'plugin', 'extra'),
    [((580, 65, 6), None, ['cuda13']), ((535, 1), None, ['cuda12']), ((580, 65, 6), '0.10.2', ['cuda12'])],
)
def test_a_gpu_needs_a_plugin_that_its_driver_runs(monkeypatch, driver, plugin, extra):
    monkeypatch.setattr(packages, 'installed_version', lambda name: plugin if 'cuda12' in name else None)
    assert list(needed_extras(case_on(gpus(driver=driver)))) == extra
    # The kernels of experts are in a package of their own, unless a capacity makes the products equal in size.
    for model, more in (({}, ['experts']), ({'model__expert_capacity_factor': 1.25}, [])):
        config = small_config(model__num_experts=4, model__num_experts_per_token=2, **model)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, expert_matmul='auto'))
        assert list(needed_extras(case_on(gpus(driver=driver), config=config))) == [*more, *extra]


def test_an_extra_that_is_missing_is_named():
    plain = {'jax_cuda12_plugin': None, 'jax_cuda13_plugin': None}
    found = evaluate_packages(WANTED, {'gcs': 'gs://b', 'cuda13': '2 × H100'}, version_of(gcsfs=None, **plain))
    assert found.status is CheckStatus.FAILURE
    assert 'gcsfs is missing (for gs://b)' in found.message
    assert 'jax-cuda13-plugin is missing (for 2 × H100)' in found.message
    assert pip_install('gcs') in found.remedy
    assert pip_install('cuda13') in found.remedy
    # Control: installed packages are not reported.
    assert evaluate_packages(WANTED, {'gcs': 'gs://b'}, version_of(**plain)).status is CheckStatus.OK


def test_a_plugin_of_another_version_than_jaxlib():
    found = evaluate_packages(WANTED, {}, version_of(jax_cuda12_plugin='0.9.1', jax_cuda13_plugin=None))
    assert (found.status, found.message) == (
        CheckStatus.FAILURE,
        'jax-cuda12-plugin 0.9.1 does not match jaxlib 0.10.2',
    )


def test_without_a_checkout_the_metadata_is_read(tmp_path, monkeypatch):
    lines = """\
Metadata-Version: 2.4
Name: maxlm
Requires-Python: >=3.11
Classifier: Programming Language :: Python :: 3.11
Requires-Dist: jax>=0.10
Requires-Dist: gcsfs>=2026.4; extra == "gcs"
Provides-Extra: gcs
"""
    folder = tmp_path / 'maxlm-1.dist-info'
    folder.mkdir()
    (folder / 'METADATA').write_text(lines)
    distribution = importlib.metadata.PathDistribution(folder)
    monkeypatch.setattr(importlib.metadata, 'metadata', lambda name: distribution.metadata)
    wanted = read_requirements(tmp_path / 'none.toml')
    assert wanted.python == '>=3.11'
    assert wanted.tested_versions == ('3.11',)
    assert wanted.packages == ('jax>=0.10',)
    found = evaluate_packages(wanted, {'gcs': 'gs://b'}, version_of(gcsfs='2020.1'))
    assert 'gcsfs 2020.1, but >=2026.4 is needed' in found.message


def test_a_missing_package_is_an_error(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, 'metadata', missing)
    with pytest.raises(InputError, match='maxlm is not installed'):
        read_requirements(tmp_path / 'none.toml')


def test_this_environment():
    assert packages.check_python(case_on(CPU)).status is CheckStatus.OK
    assert packages.check_packages(case_on(CPU)).status is CheckStatus.OK
