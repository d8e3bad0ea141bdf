"""Streaming of parameters by layer: exact round trips, minimal reads and memory, and atomic writes."""

import json
import math
import resource
import shutil
import weakref

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from maxlm.checkpoint import streaming
from maxlm.checkpoint.item_metadata import CorruptCheckpointError, item_metadata
from maxlm.checkpoint.manager import Checkpoints, find_step
from maxlm.checkpoint.params import STACK, chunked_by_layer, restore_params
from maxlm.checkpoint.streaming import ParamsReader, StreamedArray, write_step
from maxlm.errors import InputError
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR
from tests.checkpoint.test_manager import abstract_on, random_state, same, save

pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')

# With layers of 16 KiB, the cost of a layer exceeds that of the checkpoint's index.
WIDE = {'model__num_layers': 4, 'model__dim': 64, 'model__num_heads': 4}
KERNEL = 'blocks.attention.query.kernel'


def flatten(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {'.'.join(entry.key for entry in path): np.asarray(leaf) for path, leaf in leaves}


def stacked(path):
    return path.startswith(f'{STACK}.')


def streamed(arrays, read=lambda values: values):
    """Returns streamed arrays to write; `read` is applied to each layer."""

    def source(values):
        return lambda layer: read(values if layer is None else values[layer])

    return {path: StreamedArray(values.shape, source(values), stacked(path)) for path, values in arrays.items()}


@pytest.fixture(scope='module')
def state():
    return random_state(abstract_on(8, **WIDE), step=7, skipped=0)


@pytest.fixture(scope='module')
def arrays(state):
    return flatten(jax.device_get(state.params))


@pytest.fixture(scope='module')
def saved(tmp_path_factory, state):
    """Returns a workdir with checkpoint 7 as saved by training; tests must not change it."""
    workdir = tmp_path_factory.mktemp('saved')
    save(workdir, [state])
    return workdir


@pytest.fixture(scope='module')
def unchunked(tmp_path_factory, state):
    """Returns a checkpoint of the same parameters in the older format without chunks per layer."""
    directory = tmp_path_factory.mktemp('unchunked') / CHECKPOINTS_DIR / '7'
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / 'params', jax.device_get(state.params))
    return directory.parent.parent


def assert_reads(workdir, arrays, step=7):
    reader = ParamsReader(workdir / CHECKPOINTS_DIR / str(step))
    assert reader.shapes == {path: values.shape for path, values in arrays.items()}
    for path, values in arrays.items():
        assert np.array_equal(reader.read(path), values), path
        for layer in range(len(values)) if stacked(path) else ():
            read = reader.read(path, layer)
            assert (read.dtype, read.shape) == (np.float32, values.shape[1:])
            assert np.array_equal(read, values[layer]), (path, layer)
            # Negative control: layers differ.
            assert not np.array_equal(read, values[layer - 1]), (path, layer)


def test_complete_arrays_and_layers_equal_the_saved_arrays(saved, unchunked, arrays):
    assert_reads(saved, arrays)
    assert_reads(unchunked, arrays)


def test_ema_is_read_by_item_name(tmp_path, state):
    other = random_state(abstract_on(8, **WIDE), step=7, skipped=0, seed=5)
    save(tmp_path, [state._replace(ema=other.params)])
    average = ParamsReader(tmp_path / CHECKPOINTS_DIR / '7', 'ema').read(KERNEL, 2)
    assert np.array_equal(average, flatten(other.params)[KERNEL][2])
    assert not np.array_equal(average, ParamsReader(tmp_path / CHECKPOINTS_DIR / '7').read(KERNEL, 2))


def test_stacked_arrays_are_chunked_by_layer(saved, state):
    for item, tree in {'params': state.params, 'optimizer': state.opt_state}.items():
        chunks = {
            leaf.name: leaf.storage.chunk_shape
            for leaf in jax.tree.leaves(item_metadata(saved / CHECKPOINTS_DIR / '7' / item))
        }
        assert len(chunks) == len(jax.tree.leaves(tree))
        layer_arrays = {name for name in chunks if STACK in name.split('.')}
        assert {chunks[name][0] for name in layer_arrays} == {1}
        # Negative control: other arrays are only chunked over devices.
        others = {name: chunk for name, chunk in chunks.items() if name not in layer_arrays and chunk}
        assert {chunk[0] for name, chunk in others.items() if name.endswith('embedding')} >= {61}
    assert chunks['0.mu.blocks.attention.query.kernel'] == (1, 8, 4, 16)


def bytes_read():
    metrics = tensorstore.experimental_collect_matching_metrics('/tensorstore/kvstore/file/bytes_read')
    return sum(value['value'] for metric in metrics for value in metric['values'])


def cost(reader, path, layer):
    before = bytes_read()
    reader.read(path, layer)
    return bytes_read() - before


def test_read_arrays_are_verified_with_checksums(saved, tmp_path, arrays):
    shutil.copytree(saved, tmp_path / 'run')
    step = find_step(str(tmp_path / 'run'))
    last = arrays[KERNEL].shape[0] - 1

    def read():
        reader = ParamsReader(step)
        for layer in reversed(range(last + 1)):
            yield reader.read(KERNEL, layer)
        yield reader.read(KERNEL)
        yield reader.read('embedding')

    # Negative control: intact arrays are read in any order.
    assert len(list(read())) == last + 3
    path = step / 'checksums' / 'metadata'
    content = json.loads(path.read_text())
    content['params'][KERNEL] = content['params']['embedding'] = '(1,) float32 00000000'
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpointError, match=rf'params: damaged: {KERNEL} has checksum '):
        list(read())
    for name in (KERNEL, 'embedding'):
        with pytest.raises(CorruptCheckpointError, match=f'damaged: {name} has checksum '):
            ParamsReader(step).read(name)
    # Other arrays are unchanged.
    ParamsReader(step).read(next(name for name in arrays if name not in (KERNEL, 'embedding')))


def test_reading_a_layer_reads_only_its_bytes(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 256, 256)).astype(np.float32)
    tree = {STACK: {'kernel': values}}
    write_step(tmp_path, 0, streamed({f'{STACK}.kernel': values}))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / CHECKPOINTS_DIR / '1' / 'params', tree, save_args=chunked_by_layer(tree))
        checkpointer.save(tmp_path / CHECKPOINTS_DIR / '2' / 'params', tree)
    readers = [ParamsReader(tmp_path / CHECKPOINTS_DIR / str(step)) for step in range(3)]
    size = values[2].nbytes
    assert 0.8 * size < cost(readers[0], f'{STACK}.kernel', 2) < 1.1 * size
    assert 0.8 * size < cost(readers[1], f'{STACK}.kernel', 2) < 1.1 * size
    # Negative control: an array without chunks is read completely.
    assert cost(readers[2], f'{STACK}.kernel', 2) > 3 * size


def test_written_step_can_be_restored(tmp_path, arrays, state):
    write_step(tmp_path, 0, streamed(arrays))
    assert find_step(str(tmp_path)) == tmp_path / CHECKPOINTS_DIR / '0'
    assert {entry.name for entry in (tmp_path / CHECKPOINTS_DIR / '0').iterdir() if entry.is_dir()} == {
        'params',
        'progress',
    }
    for num_devices in (8, 1):
        abstract = abstract_on(num_devices, **WIDE).params
        params = restore_params(tmp_path / CHECKPOINTS_DIR / '0', abstract)
        assert same(jax.device_get(params), jax.device_get(state.params))
        placed = jax.tree.map(lambda leaf, wanted: leaf.sharding == wanted.sharding, params, abstract)
        assert all(jax.tree.leaves(placed))
    assert_reads(tmp_path, arrays, step=0)
    with Checkpoints(tmp_path, max_to_keep=3) as checkpoints:
        assert checkpoints.latest_step() == 0
        assert checkpoints.is_params_only(0)
    # Negative control: a changed element of one layer is detected.
    write_step(
        tmp_path / 'other', 0, streamed(arrays, lambda values: values + (values.max() == arrays[KERNEL][3].max()))
    )
    other = restore_params(tmp_path / 'other' / CHECKPOINTS_DIR / '0', abstract)
    assert not same(jax.device_get(other), jax.device_get(state.params))


def test_arrays_larger_than_a_chunk(tmp_path, monkeypatch, arrays, state):
    # With chunks of 7 rows, 64 rows are 9 chunks and 1 row. They are written in blocks of 21 rows.
    row = arrays[KERNEL][0, 0].nbytes
    monkeypatch.setattr(streaming, 'CHUNK_BYTES', 7 * row)
    monkeypatch.setattr(streaming, 'MAX_BYTES_IN_FLIGHT', 21 * row + 100)
    write_step(tmp_path, 0, streamed(arrays))
    described = {
        leaf.name: leaf for leaf in jax.tree.leaves(item_metadata(tmp_path / CHECKPOINTS_DIR / '0' / 'params'))
    }
    assert described[KERNEL].storage.chunk_shape == (1, 7, 4, 16)
    assert described['embedding'].storage.chunk_shape == (7, 64)
    assert_reads(tmp_path, arrays, step=0)
    params = restore_params(tmp_path / CHECKPOINTS_DIR / '0', abstract_on(8, **WIDE).params)
    assert same(jax.device_get(params), jax.device_get(state.params))


@pytest.mark.parametrize(('rows', 'chunk'), [(1, 1), (64, 7), (5, 5), (100, 1), (30, 40)])
def test_blocks_cover_an_array_once_and_never_split_a_chunk(monkeypatch, rows, chunk):
    monkeypatch.setattr(streaming, 'MAX_BYTES_IN_FLIGHT', 4 * 3 * 10)
    blocks = list(streaming._row_slices((rows, 3), (chunk, 3)))
    assert [row for block in blocks for row in range(rows)[block]] == list(range(rows))
    assert all(block.start % chunk == 0 for block in blocks)
    assert all(block.stop - block.start <= max(10, chunk) for block in blocks)


def test_layers_are_freed_after_they_are_written(tmp_path, arrays):
    alive, max_alive, num_reads = weakref.WeakSet(), 0, 0

    class Layer(np.ndarray):
        """Array type whose instances can be counted."""

        __hash__ = object.__hash__

    def read(values):
        nonlocal max_alive, num_reads
        max_alive, num_reads = max(max_alive, len(alive)), num_reads + 1
        layer = values.copy().view(Layer)
        alive.add(layer)
        return layer

    write_step(tmp_path, 0, streamed(arrays, read))
    assert num_reads == sum(len(values) if stacked(path) else 1 for path, values in arrays.items())
    # The previous array may not be freed yet.
    assert max_alive <= 1


@pytest.mark.parametrize('error', [InputError('shard 3 is damaged'), KeyboardInterrupt(), OSError(28, 'No space left')])
def test_failed_write_leaves_no_files(tmp_path, arrays, error):
    count = 0

    def read(values):
        nonlocal count
        count += 1
        if count == 20:
            raise error
        return values

    with pytest.raises((InputError, KeyboardInterrupt)) as info:
        write_step(tmp_path, 0, streamed(arrays, read))
    assert str(error) in str(info.value) or 'No space left' in str(info.value)
    assert list(tmp_path.iterdir()) == []
    # Negative control: the same write without the error.
    write_step(tmp_path, 0, streamed(arrays))
    assert_reads(tmp_path, arrays, step=0)


def test_full_disk(tmp_path, arrays):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 1024, before[1]))
    try:
        with pytest.raises(InputError, match='cannot be written') as info:
            write_step(tmp_path, 0, streamed(arrays))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert '\n' not in str(info.value)
    assert list(tmp_path.iterdir()) == []


def test_existing_step_is_not_overwritten(saved, arrays):
    before = ParamsReader(saved / CHECKPOINTS_DIR / '7').read(KERNEL, 0)
    with pytest.raises(InputError, match='checkpoint already exists') as info:
        write_step(saved, 7, streamed(arrays))
    assert str(saved / CHECKPOINTS_DIR / '7') in str(info.value)
    assert np.array_equal(ParamsReader(saved / CHECKPOINTS_DIR / '7').read(KERNEL, 0), before)


def test_unwritable_path(tmp_path, arrays):
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(InputError, match=r'Not a directory|File exists'):
        write_step(tmp_path / 'file', 0, streamed(arrays))
    assert (tmp_path / 'file').read_text() == 'mine'


def test_unreadable_item_is_named(saved, tmp_path):
    with pytest.raises(InputError, match='missing from the checkpoint'):
        ParamsReader(saved / CHECKPOINTS_DIR / '8')
    with pytest.raises(InputError, match='missing from the checkpoint') as info:
        ParamsReader(saved / CHECKPOINTS_DIR / '7', 'ema')
    assert str(saved / CHECKPOINTS_DIR / '7' / 'ema') in str(info.value)
    shutil.copytree(saved, tmp_path / 'run')
    step = tmp_path / 'run' / CHECKPOINTS_DIR / '7'
    reader = ParamsReader(step)
    for file in (step / 'params').rglob('d/*'):
        file.write_bytes(b'no array')
    with pytest.raises(InputError, match='checkpoint cannot be read') as info:
        reader.read(KERNEL, 1)
    assert str(step / 'params') in str(info.value)
    assert '\n' not in str(info.value)


def test_another_dtype_is_refused(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / CHECKPOINTS_DIR / '0' / 'params', {'embedding': np.ones((3, 2), np.float16)})
    with pytest.raises(InputError, match='embedding has dtype float16'):
        ParamsReader(tmp_path / CHECKPOINTS_DIR / '0')


def test_chunk_shapes_match_the_docstring():
    # A chunk contains at least one row of any size, and the empty shape is a scalar.
    assert streaming._chunk_shape((5, 2**26)) == (1, 2**26)
    assert streaming._chunk_shape(()) == ()
    assert math.prod(streaming._chunk_shape((32_000, 4096))) * 4 <= streaming.CHUNK_BYTES
