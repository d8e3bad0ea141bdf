"""Metadata of the items of a step, and readers that report each failure in one line."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from maxlm.errors import InputError
from maxlm.storage.check_directory import check_entries
from maxlm.storage.errors import ErrorKind, TransientStorageError, error_kind, short_message
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import MAX_TEXT_BYTES
from maxlm.workdir.step_dirs import in_bucket

# File of a JSON item, inside the directory of the item.
JSON_FILE = 'metadata'
# OCDBT stores array data in directories of this name.
_DATA_FOLDER = 'd'
REMEDY = 'verify it with `maxlm checkpoints verify`, or start from an older step with --resume=WORKDIR@STEP'

T = TypeVar('T')


class CorruptCheckpointError(InputError):
    """An item of a step cannot be read, or differs from the saved item. Another step may be intact."""


def translate_errors(path: epath.Path, read: Callable[[], T]) -> T:
    """Returns `read()` and converts errors of Orbax, TensorStore and JSON to one line.

    Raises:
        CorruptCheckpointError: the item cannot be read.
        TransientStorageError: the bucket does not respond or denies access, so the step may be intact.
    """
    dedupe_logs()
    try:
        return read()
    except Exception as error:
        if in_bucket(path) and error_kind(error) in (ErrorKind.TRANSIENT, ErrorKind.PERMISSION):
            raise TransientStorageError(
                f'{path}: cannot be read from the bucket at the moment ({short_message(str(path), error)})'
            ) from None
        reason = (str(error).strip().splitlines() or ['no message'])[0][:100]
        raise CorruptCheckpointError(
            f'{path}: checkpoint cannot be read ({type(error).__name__}: {reason}); {REMEDY}'
        ) from None


def read_json(item: epath.Path) -> dict[str, Any]:
    """Returns the content of a JSON item.

    Raises:
        CorruptCheckpointError: the item is missing, or is not a JSON object.
    """

    check_files(item)

    def read() -> dict[str, Any]:
        content = parse_json((item / JSON_FILE).read_text(encoding='utf-8'))
        if not isinstance(content, dict):
            raise TypeError(f'{item.name} is not a JSON object: {content!r}')
        return content

    return translate_errors(item, read)


def item_metadata(path: epath.Path) -> Any:
    """Returns the metadata of an item: a tree whose leaves have name, shape and dtype.

    Raises:
        CorruptCheckpointError: the item is missing or cannot be read.
    """
    check_files(path)
    with ocp.StandardCheckpointer() as checkpointer:
        tree = translate_errors(path, lambda: checkpointer.metadata(path).item_metadata)
    if tree is None:
        # Orbax does not distinguish the two cases.
        raise CorruptCheckpointError(f'{path}: missing from the checkpoint, or damaged; {REMEDY}')
    return tree


def check_files(item: epath.Path) -> None:
    """Checks all files of an item on a disk before Orbax and TensorStore open them.

    Raises:
        CorruptCheckpointError: a file is a special file, links outside the item, or is a metadata file above the size
            limit.
    """
    if in_bucket(item):
        return
    try:
        if os.path.islink(item):
            check_entries(item.parent, [item.name])
        for folder, folders, files in os.walk(item):
            linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            limit = None if os.path.basename(folder) == _DATA_FOLDER else MAX_TEXT_BYTES
            check_entries(folder, [*files, *linked], root=item, limit=limit)
    except InputError as error:
        raise CorruptCheckpointError(f'{error}; {REMEDY}') from error


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by dotted path."""
    return {'.'.join(map(key_name, path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def descriptions(tree: Any) -> dict[str, str]:
    """Returns `shape dtype` of the arrays of a tree by dotted path."""
    return {name: f'{tuple(leaf.shape)} {jnp.dtype(leaf.dtype).name}' for name, leaf in named_leaves(tree).items()}


def key_name(entry: Any) -> str:
    """Returns the name of one entry of a tree path."""
    return str(getattr(entry, 'key', getattr(entry, 'name', getattr(entry, 'idx', entry))))


def dedupe_logs() -> None:
    """Suppresses repeated logs of Orbax's threads and tasks about one failed read or write.

    Orbax prints and logs one failure many times, each with a traceback. The filter is permanent, because such logs
    appear until the process exits.
    """
    if getattr(sys.excepthook, '__name__', '') != _on_exception.__name__:
        sys.excepthook, sys.unraisablehook = _on_exception, _on_unraisable
    for name in ('absl', 'asyncio'):
        logging.getLogger(name).addFilter(_of_others)


_MAIN_THREAD = threading.main_thread().ident


def _is_echo(error: BaseException | None) -> bool:
    return any(message in str(error) for message in ('Event loop is closed', 'TensorStore'))


def _on_exception(kind: type, error: BaseException, trace: Any) -> None:
    # Exceptions of the main thread end the program and are always printed.
    if threading.get_ident() == _MAIN_THREAD or not _is_echo(error):
        sys.__excepthook__(kind, error, trace)


def _on_unraisable(unraisable: Any) -> None:
    if not _is_echo(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def _of_others(record: logging.LogRecord) -> bool:
    # asyncio logs an unretrieved task exception with the path of the file that defines the task.
    return 'orbax' not in record.pathname and 'orbax' not in record.getMessage()
