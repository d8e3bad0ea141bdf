"""Versions of the packages that determine the bytes of a data set. All machines of a preparation must have the same."""

from __future__ import annotations

import importlib.metadata

import maxlm

# Packages that decompress, parse and encode text, find duplicates and write shards.
PACKAGES = ('array_record', 'datasets', 'pyarrow', 'rensa', 'tokenizers', 'zstandard')


def package_versions() -> dict[str, str]:
    """Returns the versions by name of the package, without those that are not installed."""
    versions = {'maxlm': maxlm.__version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
