"""Failed reads are reported in one line by the caller."""

import asyncio
import gc
import types

import pytest

from maxlm.checkpoint.item_metadata import CorruptCheckpointError, translate_errors


def coroutine_of(path):
    """Returns a coroutine from a file with the given path that fails like TensorStore."""
    module = types.ModuleType('failing_reader')
    exec(compile('async def read_array():\n    raise ValueError("OUT_OF_RANGE")\n', path, 'exec'), module.__dict__)
    return module.read_array


def fails_in_two_tasks(read_array):
    """Reads two arrays; the second fails at the moment when the failure of the first cancels all reads."""

    async def both():
        first, second = asyncio.ensure_future(read_array()), asyncio.ensure_future(read_array())
        del second
        await first

    asyncio.run(both())


@pytest.mark.parametrize(
    ('path', 'is_logged'),
    # Negative control: errors of other packages' tasks are still logged.
    [('site-packages/orbax/checkpoint/serialization.py', False), ('site-packages/other/reader.py', True)],
)
def test_only_the_first_orbax_failure_is_reported(tmp_path, caplog, path, is_logged):
    with pytest.raises(CorruptCheckpointError, match=r'checkpoint cannot be read \(ValueError: OUT_OF_RANGE\)'):
        translate_errors(tmp_path, lambda: fails_in_two_tasks(coroutine_of(path)))
    gc.collect()
    assert ('Task exception was never retrieved' in caplog.text) == is_logged
