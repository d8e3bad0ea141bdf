import importlib.metadata

import maxlm
from maxlm.data.parts import versions
from maxlm.data.parts.versions import package_versions


def test_versions_of_installed_packages(monkeypatch):
    found = package_versions()
    assert found['maxlm'] == maxlm.__version__
    assert found['tokenizers'] == importlib.metadata.version('tokenizers')
    monkeypatch.setattr(versions, 'PACKAGES', ('tokenizers', 'no_such_package'))
    assert package_versions().keys() == {'maxlm', 'tokenizers'}
