"""Stored outputs of a teacher beside a data set: the most likely tokens of each position of its training windows.

OUTPUT/teacher.json        settings on which the outputs depend; written first
OUTPUT/windows-NUMBER.npy  [N, T, K] of (id, log_prob) for the N ≤ WINDOWS_PER_FILE windows from this number on; renamed
                           when it is complete
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.config.schema import Config
from maxlm.data.dataset.records import DatasetManifest
from maxlm.data.loader.windows import Batch, Sequences
from maxlm.errors import InputError, os_message
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_text

MANIFEST = 'teacher.json'
# An interrupted pass repeats at most this number of windows. 1024 windows of 1024 tokens with 64 outputs take 256 MiB.
WINDOWS_PER_FILE = 1024
KEY = 'distill.logits_dir'


@dataclasses.dataclass(frozen=True)
class TeacherManifest:
    """Settings on which stored outputs depend.

    Attributes:
        teacher: name of the checkpoint.
        checksum: checksum of its parameters; '' if it has none.
        dataset: fingerprint of the data set.
        vocab_size: number of token ids of the teacher.
        seq_len: tokens of a window.
        document_mask: as `data.document_mask`.
        top_k: number K of stored tokens of each position.
        temperature: temperature of the stored log-probabilities.
    """

    teacher: str
    checksum: str
    dataset: str
    vocab_size: int
    seq_len: int
    document_mask: bool
    top_k: int
    temperature: float


def output_dtype(vocab_size: int) -> np.dtype:
    """Returns the stored type of one token: its id and its log-probability."""
    return np.dtype([('id', '<u2' if vocab_size <= 2**16 else '<u4'), ('log_prob', '<f2')])


def output_file(directory: Path, first: int) -> Path:
    """Returns the file with the outputs of the windows from number `first` on."""
    return directory / f'windows-{first:010d}.npy'


def read_manifest(directory: Path) -> TeacherManifest:
    """Returns the manifest of stored outputs.

    Raises:
        InputError: there is no valid manifest.
    """
    try:
        return TeacherManifest(**parse_json(read_text(directory / MANIFEST)))
    except OSError as error:
        raise InputError(f'{directory / MANIFEST}: {os_message(error)}; choose an output of `maxlm distill`') from error
    except (ValueError, TypeError) as error:
        raise InputError(
            f'{directory / MANIFEST}: not a valid manifest ({error}); run `maxlm distill` again'
        ) from error


class TeacherOutputReader:
    """Random access to stored outputs by window. Picklable and thread-safe."""

    def __init__(self, directory: Path, windows: Sequences, *, top_k: int, vocab_size: int):
        """
        Args:
            directory: directory of the outputs.
            windows: windows of the train split.
            top_k: number of tokens to return for each position.
            vocab_size: number of token ids of the teacher.

        Raises:
            InputError: outputs are missing or damaged.
        """
        self._directory, self._num_windows, self._length = directory, len(windows), windows.window
        self._top_k, self._dtype = top_k, output_dtype(vocab_size)
        for first in range(0, self._num_windows, WINDOWS_PER_FILE):
            self._open(first)

    def batch(self, windows: Sequence[int | None]) -> Batch:
        """Returns `teacher_ids`, int32, and `teacher_log_probs`, float32, of windows: [B, T, top_k]; 0 for None."""
        shape = (len(windows), self._length, self._top_k)
        ids, log_probs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, window in enumerate(windows):
            if window is not None:
                index = window % WINDOWS_PER_FILE
                found = self._open(window - index)[index][:, : self._top_k]
                ids[row], log_probs[row] = found['id'], found['log_prob']
        return {'teacher_ids': ids, 'teacher_log_probs': log_probs}

    def _open(self, first: int) -> np.ndarray:
        """Memory-maps the file whose first window is `first`. The file is not kept open, because there may be many."""
        file = output_file(self._directory, first)
        if not file.is_file():
            raise InputError(f'{file}: missing; run `maxlm distill` again to complete the outputs')
        try:
            array: np.ndarray = np.load(file, mmap_mode='r', allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f'{file}: cannot be read ({error}); delete it and run `maxlm distill` again') from error
        windows = min(WINDOWS_PER_FILE, self._num_windows - first)
        if array.dtype != self._dtype or array.shape[:2] != (windows, self._length) or array.shape[2] < self._top_k:
            raise InputError(
                f'{file}: has shape {array.shape} of {array.dtype}, which does not fit the data; delete it and run '
                '`maxlm distill` again'
            )
        return array


def open_teacher_outputs(config: Config, dataset: DatasetManifest, windows: Sequences) -> TeacherOutputReader | None:
    """Opens the outputs in `distill.logits_dir` for the windows of the train split; None without such a directory.

    Raises:
        InputError: the outputs are incomplete, or those of other data or settings.
    """
    distill, data = config.distill, config.data
    if not distill.logits_dir:
        return None
    directory = Path(distill.logits_dir)
    stored = read_manifest(directory)
    expected: dict[str, tuple[str, Any]] = {
        'vocab_size': ('model.vocab_size', config.model.vocab_size or dataset.vocab_size),
        'seq_len': ('data.seq_len', data.seq_len),
        'document_mask': ('data.document_mask', data.document_mask),
        'temperature': ('distill.temperature', distill.temperature),
    }
    for name, (key, value) in expected.items():
        if getattr(stored, name) != value:
            raise InputError(
                f'{KEY}={directory}: was written with {key}={getattr(stored, name)}, but the config has {value}; set '
                f'{key}={getattr(stored, name)}, or run `maxlm distill` with another --output'
            )
    if stored.dataset != dataset.fingerprint:
        raise InputError(
            f'{KEY}={directory}: belongs to another data set than {dataset.path}; run `maxlm distill` for it'
        )
    if not 0 < distill.top_k <= stored.top_k:
        raise InputError(
            f'{KEY}={directory}: has {stored.top_k} tokens for each position, but distill.top_k={distill.top_k}; set '
            f'it to 1 … {stored.top_k}'
        )
    return TeacherOutputReader(directory, windows, top_k=distill.top_k, vocab_size=stored.vocab_size)
