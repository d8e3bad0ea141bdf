"""Runs a teacher over the training windows of a data set and stores its most likely tokens.

Each file is renamed when it is complete, so an interrupted pass continues with the next file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlm.checkpoint.checksums import read_checksums
from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.params import params_item
from maxlm.data.loader.dataset import TrainingData
from maxlm.data.loader.teacher_outputs import (
    MANIFEST,
    WINDOWS_PER_FILE,
    TeacherManifest,
    output_dtype,
    output_file,
    read_manifest,
)
from maxlm.data.loader.windows import Batch, Sequences
from maxlm.errors import InputError
from maxlm.inference.load import LoadedModel
from maxlm.log import progress_bar
from maxlm.storage.atomic import atomic_write, check_space, new_file
from maxlm.training.forward import make_forward
from maxlm.training.losses.distillation import StoredOutputs, top_k_log_probs


class StoredPass(NamedTuple):
    """Result of a pass: its directory, and the numbers of windows and bytes that it contains."""

    directory: Path
    windows: int
    bytes: int


def store_teacher_outputs(
    model: LoadedModel, corpus: TrainingData, directory: Path, manifest: TeacherManifest, *, batch_size: int, show: bool
) -> StoredPass:
    """Writes the outputs of a teacher for the train split of a local data set.

    Args:
        model: the teacher.
        corpus: data with one source.
        directory: output directory. Complete files of an earlier pass with the same manifest are kept.
        manifest: properties of this pass that determine its outputs.
        batch_size: number of windows that the model processes at a time.
        show: show progress.

    Raises:
        InputError: the directory contains other outputs or cannot be written, or the disk is full.
    """
    windows = corpus.sources[0].windows('train', corpus.data)
    dtype, row = output_dtype(manifest.vocab_size), (corpus.data.seq_len, manifest.top_k)
    size = len(windows) * row[0] * row[1] * dtype.itemsize
    starts = range(0, len(windows), WINDOWS_PER_FILE)
    missing = [first for first in starts if not output_file(directory, first).is_file()]
    counts = {first: min(WINDOWS_PER_FILE, len(windows) - first) for first in starts}
    left = sum(counts[first] for first in missing)
    check_space('--output', directory, left * row[0] * row[1] * dtype.itemsize)
    _open_directory(directory, manifest)
    rows = _rows(model, batch_size)
    outputs = make_outputs(model._replace(config=_config(model, manifest, rows)), manifest, rows)
    with progress_bar('distill', total=len(windows), initial=len(windows) - left, unit='window', show=show) as bar:
        for first in missing:
            header = {'descr': dtype.descr, 'fortran_order': False, 'shape': (counts[first], *row)}
            with new_file(output_file(directory, first)) as partial, partial.open('wb') as file:
                np.lib.format.write_array_header_1_0(file, header)
                stop = first + counts[first]
                for start in range(first, stop, rows):
                    numbers = range(start, min(start + rows, stop))
                    file.write(_stored(outputs(_batch(windows, numbers, rows)), dtype)[: len(numbers)].tobytes())
                    bar.update(len(numbers))
    return StoredPass(directory, len(windows), size)


def make_outputs(model: LoadedModel, manifest: TeacherManifest, rows: int) -> Callable[[Batch], StoredOutputs]:
    """Returns a function batch → most likely tokens of each position, of `rows` windows."""
    config, layout = model.config, model.layout
    forward = make_forward(config, layout)

    def run(params: Any, batch: Any) -> StoredOutputs:
        hidden_BTD, decoder, _ = forward(params, None, batch, None)
        return top_k_log_probs(
            hidden_BTD,
            decoder.output_kernel(),
            k=manifest.top_k,
            temperature=manifest.temperature,
            partitioning=layout,
            chunk=config.train.loss_chunk_tokens,
            logit_softcap=config.model.logit_softcap,
        )

    step = jax.jit(run, out_shardings=layout.named())
    return lambda batch: StoredOutputs(*jax.device_get(step(model.params, layout.put_batch(batch, rows))))


def teacher_manifest(
    teacher: str, model: LoadedModel, corpus: TrainingData, *, top_k: int, temperature: float
) -> TeacherManifest:
    """Returns the manifest of a pass over a data set by the model of the checkpoint `teacher`."""
    step = find_local_step(teacher)
    sums = (read_checksums(step) or {}).get(params_item(step), {})
    return TeacherManifest(
        teacher=str(step),
        checksum=hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest() if sums else '',
        dataset=corpus.first.fingerprint,
        vocab_size=model.config.model.vocab_size,
        seq_len=corpus.data.seq_len,
        document_mask=corpus.data.document_mask,
        top_k=top_k,
        temperature=temperature,
    )


def _open_directory(directory: Path, manifest: TeacherManifest) -> None:
    """Writes the manifest of a new directory, or compares it with that of an existing one."""
    if not (directory / MANIFEST).exists():
        atomic_write(directory / MANIFEST, json.dumps(dataclasses.asdict(manifest), indent=2) + '\n', make_parents=True)
        return
    before, now = (dataclasses.asdict(one) for one in (read_manifest(directory), manifest))
    for name, value in now.items():
        # The checksum identifies a teacher that was moved.
        if before[name] != value and not (name == 'teacher' and manifest.checksum):
            raise InputError(
                f'--output={directory}: contains outputs with {name}={before[name]!r}, but this pass has {value!r}; '
                'choose another directory'
            )


def _rows(model: LoadedModel, batch_size: int) -> int:
    shards = model.config.batch_shards
    return -(-batch_size // shards) * shards


def _config(model: LoadedModel, manifest: TeacherManifest, rows: int) -> Any:
    config = model.config
    data = dataclasses.replace(config.data, seq_len=manifest.seq_len, document_mask=manifest.document_mask)
    train = dataclasses.replace(config.train, global_batch_size=rows, per_device_batch_size=rows // config.batch_shards)
    return dataclasses.replace(config, data=data, train=train)


def _batch(windows: Sequences, numbers: range, rows: int) -> Batch:
    """Returns a batch of `rows` windows; those after `numbers` are padding."""
    streams = [windows.stream(number) for number in numbers]
    return windows.batch([*streams, *[np.zeros(1, np.int32)] * (rows - len(streams))])


def _stored(outputs: StoredOutputs, dtype: np.dtype) -> np.ndarray:
    found = np.empty(outputs.ids_BTK.shape, dtype)
    found['id'], found['log_prob'] = outputs
    return found
