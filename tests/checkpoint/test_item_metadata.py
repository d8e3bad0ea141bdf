"""What fails to be read is told in one line, by whoever asked for it."""

import asyncio
import gc
import types

import pytest

from maxlm.checkpoint.item_metadata import CorruptCheckpointError, translate_errors


def coroutine_of(path):
    """A function that fails as TensorStore does, from a file of that path."""
    module = types.ModuleType('defined_there')
    exec(compile('async def read_array():\n    raise ValueError("OUT_OF_RANGE")\n', path, 'exec'), module.__dict__)
    return module.read_array


def fails_in_two_tasks(read_array):
    """Reads two arrays, of which the second fails in the moment in which the first one's failure ends all reading."""

    async def both():
        first, second = asyncio.ensure_future(read_array()), asyncio.ensure_future(read_array())
        del second
        await first

    asyncio.run(both())


@pytest.mark.parametrize(
    ('path', 'told'),
    # Control: what the tasks of others have to say stays.
    [('site-packages/orbax/checkpoint/serialization.py', False), ('site-packages/other/reader.py', True)],
)
def test_only_the_first_failure_of_orbax_is_told(tmp_path, caplog, path, told):
    with pytest.raises(CorruptCheckpointError, match=r'checkpoint cannot be read \(ValueError: OUT_OF_RANGE\)'):
        translate_errors(tmp_path, lambda: fails_in_two_tasks(coroutine_of(path)))
    gc.collect()
    assert ('Task exception was never retrieved' in caplog.text) == told
