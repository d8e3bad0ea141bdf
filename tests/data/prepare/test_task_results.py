import numpy as np
import pytest

from maxlm.data.prepare import task_results
from maxlm.data.prepare.task_results import identity_of, load_result, pack, save_result, unpack


def test_a_result_is_valid_only_for_its_identity(tmp_path, monkeypatch):
    path = tmp_path / 'r.json'
    identity = identity_of(1, ['a'], None)
    save_result(path, identity, {'n': 3})
    assert load_result(path, identity) == {'identity': identity, 'n': 3}
    assert load_result(path, identity_of(1, ['b'], None)) is None
    monkeypatch.setattr(task_results, 'RESULT_VERSION', 2)
    assert load_result(path, identity_of(1, ['a'], None)) is None


@pytest.mark.parametrize('content', [b'', b'{', b'[]', b'{}', b'\xff', b'3'])
def test_invalid_files_give_no_result(tmp_path, content):
    path = tmp_path / 'r.json'
    path.write_bytes(content)
    assert load_result(path, 'x') is None
    assert load_result(tmp_path / 'missing.json', 'x') is None


def test_arrays_are_packed():
    counts = np.zeros(100_000, np.int64)
    counts[:300] = range(300)
    assert np.array_equal(unpack(pack(counts)), counts)
    assert len(pack(counts)) < 10_000
    assert unpack(pack(np.zeros(0, bool))).dtype == bool
    for invalid in ('', 'x', pack(counts)[:-8], '!!!!'):
        with pytest.raises(ValueError):
            unpack(invalid)
