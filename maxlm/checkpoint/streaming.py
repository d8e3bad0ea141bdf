"""Reads and writes the parameters of a checkpoint by array and by layer, for models larger than memory.

In addition to the requested array or layer, it needs a few hundred MiB of memory, regardless of the size of the model.
Arrays are named by their dotted path, such as `blocks.attention.query.kernel`. Arrays below `blocks` are stacked over
layers: [L, …].
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
from maxlm.checkpoint.params import log_unused_modules, unused_modules
from maxlm.errors import InputError, os_message
from maxlm.model.mtp import MTP
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, to_path

# Size of the stored chunks. A reader decodes complete chunks even if it needs only a part. Each chunk is an entry in
# the checkpoint's index, which grows with every write.
CHUNK_BYTES = 64 * 2**20
# Bytes that are read or written at a time. The chunks among them are encoded or decoded in parallel.
MAX_BYTES_IN_FLIGHT = 4 * CHUNK_BYTES
FLOAT32 = np.dtype(np.float32)


class ParamsReader:
    """Reads the parameters of one step on demand.

    A complete array can be read from any checkpoint with memory for its size. A layer needs memory for the layer if the
    checkpoint is chunked by layer, as `Checkpoints.save` and `write_step` do, and otherwise for its stack.

    If the step has checksums, an array is verified as soon as all of it was read: a complete array immediately, a stack
    with its last layer. Earlier layers of a stack are returned unverified.

    Attributes:
        shapes: dotted path → stored shape, with the layer axis for arrays below `blocks`.
        dtypes: dotted path → dtype.
    """

    def __init__(
        self, step_directory: Path, item: str = 'params', *, may_be_quantized: bool = False, with_mtp: bool = False
    ):
        """Reads the metadata of the item, but not its arrays.

        Args:
            step_directory: result of `find_step`.
            item: `params`, or `ema` for their moving average (`params_item` returns the one to use).
            may_be_quantized: allow dtypes other than float32.
            with_mtp: include modules of multi-token prediction, which are otherwise left out.

        Raises:
            InputError: the item is missing, cannot be read, or has other dtypes.
        """
        self._path = to_path(step_directory) / item
        tree = item_metadata(self._path)
        described = {leaf.name: leaf for leaf in jax.tree.leaves(tree)}
        if unused := unused_modules(described, [MTP] if with_mtp else []):
            log_unused_modules(self._path, unused)
            described = {name: leaf for name, leaf in described.items() if name not in unused}
        for name, leaf in described.items():
            if leaf.dtype != np.float32 and not may_be_quantized:
                raise InputError(
                    f'{self._path}: {name} has dtype {leaf.dtype}, but maxlm parameters are float32; choose another '
                    'checkpoint'
                )
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(leaf.shape) for name, leaf in described.items()}
        self.dtypes = {name: np.dtype(leaf.dtype) for name, leaf in described.items()}
        self._chunk_shapes = {name: tuple(leaf.storage.chunk_shape) for name, leaf in described.items()}
        self._use_zarr3 = tree.use_zarr3
        checksums = read_checksums(self._path.parent)
        self._checksums = (checksums or {}).get(item)
        # Array → layer → partial checksum, until all layers were read.
        self._layer_checksums: dict[str, dict[int, int]] = {}
        self._context = type_handlers.get_ts_context()

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        """Reads one array, or one layer of it.

        Args:
            path: a key of `shapes`.
            layer: index along the first axis of a stacked array; None reads the complete array.

        Returns:
            Array of dtype `dtypes[path]` and shape `shapes[path]`, without the first axis if `layer` is given.

        Raises:
            InputError: the array cannot be read, or differs from the saved one.
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
        expected = {name: text for name, text in (self._checksums or {}).items() if name == path}
        verify_checksums(self._path, {self._path.name: expected}, found)

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
    """Array that is computed while it is written.

    Attributes:
        shape: shape of the complete array, including its layer axis.
        read: returns layer i, of shape `shape[1:]`, for a stacked array. Returns the complete array for None otherwise.
            It is called once for each layer, in order. Its result is freed before the next call.
        is_stacked: True if the first axis is the layer axis.
        dtype: dtype of the results of `read`.
    """

    shape: tuple[int, ...]
    read: Callable[[int | None], np.ndarray]
    is_stacked: bool
    dtype: np.dtype = FLOAT32

    # Orbax requires `size`.
    @property
    def size(self) -> int:
        return math.prod(self.shape)


def num_reads(arrays: Mapping[str, StreamedArray]) -> int:
    """Returns the number of calls of `read` with which `write_step` reads all arrays."""
    return sum(array.shape[0] if array.is_stacked else 1 for array in arrays.values())


def write_step(
    workdir: Path, step: int, arrays: Mapping[str, StreamedArray], *, on_read: Callable[[], object] = lambda: None
) -> None:
    """Writes parameters as a step without optimizer state. Arrays are read and written one after the other.

    The step becomes visible when it is complete. An error or Ctrl-C removes an incomplete step. `maxlm train` can
    start a run from it if its number is 0. Use it in one process only.

    Args:
        workdir: workdir of the step, created if missing.
        step: number of the step.
        arrays: dotted path → array, for all parameters of the model. They are read in sorted order.
        on_read: called before each call of `read`.

    Raises:
        InputError: the step exists already or cannot be written. Errors of the arrays' `read` are raised too.
    """
    directory = workdir.resolve() / CHECKPOINTS_DIR / str(step)
    if directory.exists():
        raise InputError(f'{directory}: checkpoint already exists; choose another workdir')
    registry = type_handlers.create_type_handler_registry((StreamedArray, _StreamedArrayHandler(on_read)))
    # Zarr 2, because `_StreamedArrayHandler` writes the chunk shape in its format.
    params_handler = ocp.PyTreeCheckpointHandler(use_zarr3=False, type_handler_registry=registry)
    items = {
        'params': (params_handler, ocp.args.PyTreeSave(_nest(arrays))),
        'progress': (ocp.JsonCheckpointHandler(), ocp.args.JsonSave({'step': step, 'skipped': 0})),
    }
    # Separate saves: a composite save would leave threads waiting for the item that failed.
    with _atomic_directory(directory) as unfinished:
        for item, (handler, arguments) in items.items():
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(unfinished / item, args=arguments)


class _StreamedArrayHandler(type_handlers.TypeHandler):
    """Writes StreamedArrays for Orbax. Orbax reads them with the handler that `typestr` names."""

    def __init__(self, on_read: Callable[[], object]):
        self._on_read = on_read

    def typestr(self) -> str:
        return 'np.ndarray'

    async def serialize(
        self, values: Sequence[StreamedArray], infos: Sequence[Any], args: Sequence[ocp.SaveArgs] | None = None
    ) -> list[Any]:
        # Write the arrays here, one after another. Orbax would run returned futures concurrently.
        arguments: Sequence[ocp.SaveArgs | None] = args or [None] * len(values)
        for value, info, arg in zip(values, infos, arguments, strict=True):
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
            # Orbax only splits evenly: an axis of prime size would be split into single rows.
            axis = int(value.is_stacked)
            spec['metadata']['chunks'] = [1] * axis + list(_chunk_shape(value.shape[axis:]))
            stored = await tensorstore.open(tensorstore.Spec(spec), create=True, open=True, context=info.ts_context)
            for layer in range(value.shape[0]) if value.is_stacked else (None,):
                self._on_read()
                array = value.read(layer)
                assert array.dtype == value.dtype, (array.dtype, value.dtype)
                await _write(stored if layer is None else stored[layer], array)
        return []

    # Abstract methods of Orbax. It never calls them, because it reads with the handler that `typestr` names.
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
            raise InputError(f'the checkpoint cannot be written: {reason}; check permissions and disk space') from error


def _chunk_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the chunk shape of an array [R, …]: some of its rows, at most CHUNK_BYTES if one row fits."""
    if not shape:
        return ()
    row_bytes = 4 * math.prod(shape[1:])
    return (min(shape[0], max(1, CHUNK_BYTES // row_bytes)), *shape[1:])


def _row_slices(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Iterator[Any]:
    """Yields row slices of an array [R, …]. Slices consist of complete chunks, so that no chunk is read twice."""
    if not shape:
        yield ...
        return
    row_bytes = 4 * math.prod(shape[1:])
    rows = max(1, MAX_BYTES_IN_FLIGHT // (row_bytes * chunk_shape[0])) * chunk_shape[0]
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))


@contextlib.contextmanager
def _atomic_directory(directory: Path) -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `directory` at the end, or removed after an error."""
    # Orbax's temporary name: the next run removes directories of this name after a kill.
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
            raise InputError(f'{directory}: {os_message(error)}; choose a writable directory') from error
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
