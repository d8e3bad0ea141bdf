"""Tests that the scripts and style sheets of other projects are the files that CONTRIBUTING.md lists."""

import hashlib
import re

from tests.conftest import ROOT


def test_each_file_is_listed_with_its_hash_and_its_license():
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    listed = dict(re.findall(r'^\| .* \| `(maxlm/\S+)` \| `([0-9a-f]{64})` \|$', text, re.MULTILINE))
    found = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / 'maxlm').rglob('*.min.*')}
    assert found
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
    for path in found.values():
        assert path.with_name(f'{path.name.partition(".")[0]}.LICENSE').stat().st_size > 500
