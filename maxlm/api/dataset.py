"""Prepared data sets: creates and opens them, and reads their batches."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from maxlm.config import schema
from maxlm.data.dataset.records import DatasetManifest
from maxlm.data.loader.dataset import TrainingData, check_objective, open_training_data
from maxlm.data.loader.source import open_dataset
from maxlm.data.prepare.options import PrepareOptions
from maxlm.data.prepare.prepare_dataset import prepare_dataset
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.log import logger
from maxlm.parallel.layout import Layout
from maxlm.storage.filesystem import is_url
from maxlm.storage.paths import BUCKETS, Kind, PathOption, check_key, given_path
from maxlm.trainer.batch_source import prefetched_batches
from maxlm.training.decisions.run_control import RunControl

OUTPUT = PathOption(Kind.DIRECTORY, BUCKETS)


class Dataset:
    """A prepared data set: token shards, a tokenizer and a manifest.

    Attributes:
        path: directory or URL of the data set.
        manifest: its manifest, with the counts of each split.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens a data set. Of a data set in a bucket, only the manifest is downloaded.

        Raises:
            InputError: there is no data set, or it is damaged.
        """
        self.path = given_path('path', path)
        self.manifest: DatasetManifest = open_dataset(self.path, schema.DataConfig(), logger.warning).dataset

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Dataset:
        """Opens a data set; the same as `Dataset(path)`."""
        return cls(path)

    @classmethod
    def prepare(
        cls,
        input: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        output: str | os.PathLike[str],
        **options: Any,
    ) -> Dataset:
        """Converts text to a data set, as `maxlm prepare` does. The same call continues an interrupted preparation.

        Scripts must call it under `if __name__ == '__main__':`, because it starts worker processes.

        Args:
            input: files, directories, globs or URLs of text, JSONL, Parquet or tokens, or `hf:NAME`.
            output: directory to write, or a URL (gs://…, s3://…).
            **options: options of `maxlm prepare` with underscores, such as `tokenizer='bpe:8192'`,
                `validation_fraction=0.01`, `filter=['gopher_quality']`, `deduplicate='near'` and `workers=4`.
                `quiet=True` hides the progress.

        Raises:
            InputError: an option is out of range, the inputs are unusable, or the output contains another data set.
        """
        inputs = [
            given_path('input', path, Kind.EITHER)
            for path in ([input] if isinstance(input, (str, os.PathLike)) else input)
        ]
        names = [field.name for field in dataclasses.fields(PrepareOptions) if field.name not in ('stage', 'task')]
        unknown = options.keys() - {*names}
        if unknown:
            raise InputError(f'{min(unknown)!r} is not an option of prepare; use {", ".join(names)}')
        place = check_key('output', os.fspath(output), OUTPUT)
        options['cache'] = os.path.expanduser(options.get('cache', PrepareOptions.cache))
        prepare_dataset(PrepareOptions(input=inputs, output=place if is_url(place) else Path(place), **options))
        return cls(output)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.manifest.vocab_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the train split."""
        return self.manifest.splits['train'].tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data set."""
        return self.manifest.load_tokenizer()

    def num_windows(self, config: schema.Config) -> int | None:
        """Returns the number of sequences of `data.seq_len` tokens in an epoch; None while the data is prepared.

        Raises:
            InputError: the data set is packed into sequences of another length (`manifest.packed_window`).
        """
        return self._training_data(config.data).training_windows

    def batches(self, config: schema.Config, mesh: Layout, *, start: int = 0) -> Iterator[dict[str, jax.Array]]:
        """Returns an iterator over the batches of a training run, as arrays on the mesh.

        The order is that of `maxlm train`: it depends on `data.seed` and on the step alone. The iterator ends after
        `train.num_steps`.

        Args:
            config: resolved config.
            mesh: mesh of the config.
            start: number of completed steps, to resume.

        Raises:
            InputError: the data set does not match `train.objective`, or the config changes the sequence length or the
                sources during the run.
        """
        if config.data.seq_len_schedule or config.data.sources_schedule:
            raise InputError(
                'data.seq_len_schedule and data.sources_schedule need the training loop of maxlm; remove them'
            )
        check_objective(config, self.manifest)
        return self._batches(config, mesh, start)

    def _batches(self, config: schema.Config, mesh: Layout, start: int) -> Iterator[dict[str, jax.Array]]:
        with prefetched_batches(
            start,
            config,
            RunControl(),
            corpus=self._training_data(config.data),
            layout=mesh,
            alarm=logger.warning,
            on_wait=lambda has_progressed: None,
        ) as batches:
            for batch in batches:
                yield mesh.put_batch(batch, config.train.global_batch_size)

    def _training_data(self, data: schema.DataConfig) -> TrainingData:
        return open_training_data(dataclasses.replace(data, path=self.path, sources=()), with_sources=False)

    def __repr__(self) -> str:
        return f'Dataset({self.path!r}: {self.num_tokens:,} tokens, vocabulary {self.vocab_size:,})'
