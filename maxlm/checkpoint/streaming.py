"""The parameters of a checkpoint array by array and layer by layer, for models that are larger than memory.

What is here holds, besides the array or layer that is asked for, a few hundred MiB, however large the model. Arrays are
named by their dotted path in the parameters, e.g. `blocks.attention.query.kernel`. Those below `blocks` are stacked
over layers: [L, …].
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers

from maxlm.checkpoint.checksums import array_checksum, read_checksums, verify_checksums
from maxlm.checkpoint.item_metadata import item_metadata, translate_errors
from maxlm.errors import InputError, os_message
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, to_path

# Bytes of the pieces that arrays are written in. A device that wants a part of a piece decodes all of it; each piece is
# an entry in the checkpoint's index, which grows with every write.
CHUNK_BYTES = 64 * 2**20
# Bytes that are on their way to or from the disk at a time: the pieces of it are encoded or decoded in parallel.
MAX_BYTES_IN_FLIGHT = 4 * CHUNK_BYTES
FLOAT32 = np.dtype(np.float32)


class ParamsReader:
    """Reads the parameters of one step where they lie, no more of them at a time than is asked for.

    Whole arrays come from any checkpoint at the cost of their size. A layer costs its own size where the checkpoint is
    stored by layers, as `Checkpoints.save` and `write_step` do, and that of its stack where it is not.

    What was read is compared with the checksum of its array, where the step has some, as soon as all of it was read: an
    array at once, a stack with its last layer. Before that, a layer may be damaged.

    Attributes:
        shapes: dotted path → stored shape, that of the whole stack for arrays below `blocks`.
        dtypes: dotted path → type.
    """

    def __init__(self, step_directory: Path, item: str = 'params', *, may_be_quantized: bool = False):
        """Finds what is there, without reading it.

        Args:
            step_directory: as `find_step` returns it.
            item: `params`, or `ema` for their moving average (`params_item` says which are used).
            may_be_quantized: whether arrays may be of other types than float32.

        Raises:
            InputError: the item is missing, cannot be read, or is of other types.
        """
        self._path = to_path(step_directory) / item
        tree = item_metadata(self._path)
        described = {leaf.name: leaf for leaf in jax.tree.leaves(tree)}
        for name, leaf in described.items():
            if leaf.dtype != np.float32 and not may_be_quantized:
                raise InputError(f'{self._path}: {name} is of {leaf.dtype}; parameters of maxlm are float32')
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(leaf.shape) for name, leaf in described.items()}
        self.dtypes = {name: np.dtype(leaf.dtype) for name, leaf in described.items()}
        self._chunk_shapes = {name: tuple(leaf.storage.chunk_shape) for name, leaf in described.items()}
        self._use_zarr3 = tree.use_zarr3
        checksums = read_checksums(self._path.parent)
        self._checksums = (checksums or {}).get(item)
        # By array: layer → its part of the checksum, until all are known.
        self._layer_checksums: dict[str, dict[int, int]] = {}
        self._context = type_handlers.get_ts_context()

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        """One array, or one layer of it.

        Args:
            path: a key of `shapes`.
            layer: index along the first axis of a stacked array; None reads all of it.

        Returns:
            Of `dtypes[path]` and `shapes[path]`, without its first axis when `layer` is given.

        Raises:
            InputError: it cannot be read, or its array is not what was saved.
        """
        assert path in self.shapes, path
        assert layer is None or 0 <= layer < self.shapes[path][0], (path, layer)
        values = translate_errors(self._path, lambda: self._read(path, layer))
        if self._checksums is not None:
            self._check(path, layer, values)
        return values

    def _check(self, path: str, layer: int | None, values: np.ndarray) -> None:
        total = 0
        if layer is None:
            total = array_checksum(values)
        else:
            layer_checksums = self._layer_checksums.setdefault(path, {})
            layer_checksums[layer] = array_checksum(values, layer * math.prod(self.shapes[path][1:]))
            if len(layer_checksums) < self.shapes[path][0]:
                return
            total = sum(self._layer_checksums.pop(path).values()) % 2**32
        found = {path: f'{self.shapes[path]} {self.dtypes[path].name} {total:08x}'}
        wanted = {name: text for name, text in (self._checksums or {}).items() if name == path}
        verify_checksums(self._path, {self._path.name: wanted}, found)

    def _read(self, path: str, layer: int | None) -> np.ndarray:
        info = type_handlers.ParamInfo(
            name=path, parent_dir=self._path, use_zarr3=self._use_zarr3, ts_context=self._context
        )
        spec = type_handlers.get_json_tspec_read(info, use_ocdbt=True)
        stored = tensorstore.open(tensorstore.Spec(spec), open=True, context=self._context).result()
        chunk_shape = self._chunk_shapes[path]
        if layer is not None:
            stored, chunk_shape = stored[layer], chunk_shape[1:]
        values = np.empty(stored.shape, self.dtypes[path])
        for rows in _row_slices(stored.shape, chunk_shape):
            values[rows] = stored[rows].read().result()
        return values


@dataclasses.dataclass(frozen=True)
class StreamedArray:
    """An array that is made while it is written.

    Attributes:
        shape: of the whole array, its stack over layers included.
        read: for a stacked array, layer index → that layer, of `shape[1:]`; for others, None → the whole of `shape`.
            It is called once for each, in order, and what it returned is let go before the next call.
        stacked: whether the first axis is that of layers.
        dtype: of what `read` returns.
    """

    shape: tuple[int, ...]
    read: Callable[[int | None], np.ndarray]
    is_stacked: bool
    dtype: np.dtype = FLOAT32

    # What Orbax asks of an array.
    @property
    def size(self) -> int:
        return math.prod(self.shape)


def write_step(workdir: Path, step: int, arrays: Mapping[str, StreamedArray]) -> None:
    """Writes parameters as a step without optimizer state, while they are read, one array after the other.

    The step becomes visible when all of it is written; what an error or Ctrl-C leaves half-written is removed.
    `maxlm.train` starts a run from such a step when it is step 0. For one process.

    Args:
        workdir: made if need be.
        step: number of the step.
        arrays: dotted path → array, for all parameters of the model. They are read in the order of their sorted paths.

    Raises:
        InputError: there is such a step already, or it cannot be written; and what the arrays' `read` raises.
    """
    directory = workdir.resolve() / CHECKPOINTS_DIR / str(step)
    if directory.exists():
        raise InputError(f'{directory}: there is a checkpoint already; choose another workdir')
    registry = type_handlers.create_type_handler_registry((StreamedArray, _StreamedArrayHandler()))
    # Zarr 2, since `_StreamedArrayHandler` writes in its terms how an array is cut.
    params_handler = ocp.PyTreeCheckpointHandler(use_zarr3=False, type_handler_registry=registry)
    items = {
        'params': (params_handler, ocp.args.PyTreeSave(_nest(arrays))),
        'progress': (ocp.JsonCheckpointHandler(), ocp.args.JsonSave({'step': step, 'skipped': 0})),
    }
    # One after the other: saved as one composite, they would leave threads behind that wait for one that failed.
    with _atomic_directory(directory) as unfinished:
        for item, (handler, arguments) in items.items():
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(unfinished / item, args=arguments)


class _StreamedArrayHandler(type_handlers.TypeHandler):
    """How Orbax writes StreamedArrays; it reads them back as what `typestr` says."""

    def typestr(self) -> str:
        return 'np.ndarray'

    async def serialize(
        self, values: Sequence[StreamedArray], infos: Sequence[Any], args: Sequence[ocp.SaveArgs] | None = None
    ) -> list[Any]:
        # Here, and not in the futures that Orbax lets a handler return: it would run those side by side.
        for value, info, arg in zip(values, infos, args or [None] * len(values), strict=True):
            await info.await_path_creation()
            spec = type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=True,
                global_shape=value.shape,
                local_shape=value.shape,
                dtype=value.dtype,
                process_index=jax.process_index(),
                arg=arg,
            )
            # Orbax splits into equal pieces only: where a size is prime, into single rows.
            axis = int(value.is_stacked)
            spec['metadata']['chunks'] = [1] * axis + list(_chunk_shape(value.shape[axis:]))
            stored = await tensorstore.open(tensorstore.Spec(spec), create=True, open=True, context=info.ts_context)
            for layer in range(value.shape[0]) if value.is_stacked else (None,):
                array = value.read(layer)
                assert array.dtype == value.dtype, (array.dtype, value.dtype)
                await _write(stored if layer is None else stored[layer], array)
        return []

    # Abstract in Orbax, so they have to be here. It never calls them: it reads by the handler that `typestr` names.
    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise AssertionError('streamed arrays are read as np.ndarray')

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        raise AssertionError('streamed arrays are read as np.ndarray')


async def _write(stored: tensorstore.TensorStore, values: np.ndarray) -> None:
    assert values.shape == stored.shape, (values.shape, stored.shape)
    for rows in _row_slices(values.shape, _chunk_shape(values.shape)):
        try:
            await stored[rows].write(values[rows], can_reference_source_data_indefinitely=True)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise InputError(f'the checkpoint cannot be written: {reason}') from error


def _chunk_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the pieces in which an array [R, …] is stored: some of its rows, at most PIECE bytes if one row fits."""
    if not shape:
        return ()
    row_bytes = 4 * math.prod(shape[1:])
    return (min(shape[0], max(1, CHUNK_BYTES // row_bytes)), *shape[1:])


def _row_slices(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Iterator[Any]:
    """Indices of parts of an array [R, …]: whole pieces, which could not be read twice for nothing, in rows of them."""
    if not shape:
        yield ...
        return
    row_bytes = 4 * math.prod(shape[1:])
    rows = max(1, MAX_BYTES_IN_FLIGHT // (row_bytes * chunk_shape[0])) * chunk_shape[0]
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


@contextlib.contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """A directory that becomes `directory` at the end, all at once, or vanishes when an error ends it."""
    # The name under which the next run looks for what a kill left.
    unfinished = directory.with_name(f'{directory.name}.orbax-checkpoint-tmp')
    created = [folder for folder in (unfinished, *unfinished.parents) if not folder.exists()]
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(directory)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):
            for folder in created[1:]:
                folder.rmdir()
        if isinstance(error, OSError):
            raise InputError(f'{directory}: {os_message(error)}; choose a directory that can be written to') from error
        raise


def _nest(arrays: Mapping[str, StreamedArray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, name = path.split('.')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    return tree
