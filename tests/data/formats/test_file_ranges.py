import errno
import itertools
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from maxlm.data.formats import file_ranges
from maxlm.data.formats.file_ranges import FileRange, split_file
from maxlm.data.formats.input_file import InputFile
from maxlm.data.formats.record_formats import READERS
from maxlm.storage import filesystem
from maxlm.storage.errors import StorageError, classify_error


@pytest.fixture
def file(monkeypatch):
    """Returns a function that creates a file of a format with given record boundaries."""

    def file(bounds):
        monkeypatch.setitem(READERS, 'text', READERS['text']._replace(bounds=lambda file: bounds))
        return InputFile('x', 'x', 'x', 'text', bounds[-1] if bounds else 50, '')

    return file


@pytest.mark.parametrize('bounds', [range(1001), [0, 5, 5, 300, 301, 990, 1000], [0, 1000], range(0, 1001, 250)])
@pytest.mark.parametrize('target', [1, 99, 100, 333, 1000, 5000])
def test_ranges_cover_all_units_once(file, bounds, target):
    input_file = file(bounds)
    ranges = split_file(input_file, target)
    if len(ranges) == 1:
        assert ranges == [FileRange(input_file, 0, 0, 1000)] or len(bounds) == 2
        return
    assert ranges[0].start == 0
    assert ranges[-1].stop == len(bounds) - 1
    assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
    assert all(file_range.start < file_range.stop for file_range in ranges)
    assert sum(file_range.size for file_range in ranges) == 1000
    # A range is no larger than the target plus the unit that straddles its end.
    unit = max(b - a for a, b in itertools.pairwise(bounds))
    assert all(file_range.size <= target + unit for file_range in ranges)


def test_small_and_unsplittable_files_are_one_range(file):
    assert split_file(file(range(101)), 100) == [FileRange(file(range(101)), 0, 0, 100)]
    assert len(split_file(file(range(102)), 100)) == 2
    assert split_file(file(()), 1) == [FileRange(file(()), 0, 0, 50)]


def test_ranges_are_picklable(file):
    file_range = split_file(file(range(1000)), 10)[3]
    assert pickle.loads(pickle.dumps(file_range)) == file_range
    assert file_ranges.split_file(file_range.file, 10)[3] == file_range


@pytest.mark.parametrize('name', ['x.parquet', 'x.npz'])
def test_an_outage_while_splitting_is_not_reported_as_damage(tmp_path, monkeypatch, name):
    path = tmp_path / name
    if name.endswith('.npz'):
        np.savez(path, **{f'a{i}': np.arange(1000, dtype=np.uint16) for i in range(4)})
        input_file = InputFile(str(path), name, 'x', 'tokens', path.stat().st_size, '')
    else:
        pq.write_table(pa.table({'text': [f'{i:0100}' for i in range(400)]}), path, row_group_size=100)
        input_file = InputFile(str(path), name, 'x', 'parquet', path.stat().st_size, '')
    assert len(split_file(input_file, 1)) == 4

    def fail(number):
        def readinto(self, buffer):
            error = OSError(number, os.strerror(number))
            raise classify_error(str(path), error) from error

        monkeypatch.setattr(filesystem._LocalFile, 'readinto', readinto)

    # Ranges that depend on transient errors would produce different shards for the same input.
    fail(errno.EIO)
    with pytest.raises(StorageError, match=rf'{name}: Input/output error'):
        split_file(input_file, 1)
    fail(errno.EACCES)
    assert split_file(input_file, 1) == [FileRange(input_file, 0, 0, input_file.size)]
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:-20])
    assert split_file(input_file, 1) == [FileRange(input_file, 0, 0, input_file.size)]
