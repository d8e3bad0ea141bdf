"""Commands that install extras: an index has them only if maxlm does not run from a checkout."""

import shlex

from maxlm.installation import pip_install
from tests.conftest import ROOT


def test_in_a_checkout_the_directory_is_installed(tmp_path):
    words = shlex.split(pip_install('gcs'))
    assert words == ['pip', 'install', '-e', f'{ROOT}[gcs]']
    assert (ROOT / 'pyproject.toml').exists()
    (tmp_path / 'my code').mkdir()
    (tmp_path / 'my code/pyproject.toml').touch()
    command = pip_install(upgrade=True, checkout=tmp_path / 'my code')
    assert shlex.split(command) == ['pip', 'install', '--upgrade', '-e', f'{tmp_path}/my code']


def test_an_installed_package_comes_from_the_index(tmp_path):
    assert pip_install('cuda12', checkout=tmp_path) == "pip install 'maxlm[cuda12]'"
    assert pip_install(checkout=tmp_path) == 'pip install maxlm'
