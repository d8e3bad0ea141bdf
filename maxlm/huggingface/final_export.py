"""Exports the final parameters of a run in the format of Hugging Face (`export.at_end`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.manager import saved_steps
from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.formatting import format_bytes
from maxlm.huggingface.config_conversion import AUTO, choose_architecture
from maxlm.huggingface.export_model import MAX_SHARD_BYTES, export_model
from maxlm.log import logger
from maxlm.storage.atomic import check_new
from maxlm.storage.filesystem import display_path, is_url
from maxlm.telemetry.events import read_events
from maxlm.workdir.files import CONFIG
from maxlm.workdir.run_storage import check_url
from maxlm.workdir.upload_directory import Upload

KEY = 'export.to'
# Default directory of the export in the workdir.
NAME = 'hf'


def check_exportable(config: Config) -> None:
    """Checks before the run that its final parameters can be exported, if `export.at_end` is set.

    Raises:
        InputError: no architecture of Transformers can express the model of the resolved config, or `export.to` is not
            a valid URL.
    """
    if not config.export.at_end:
        return
    if is_url(config.export.to):
        check_url(KEY, config.export.to)
    try:
        choose_architecture(config.model, config.export.architecture)
    except InputError as error:
        raise InputError(
            f'export.at_end=True: {error}; set export.at_end=False, and export the model with `maxlm hf export`'
        ) from error


class FinalExport:
    """Export of the newest checkpoint of a run, for process 0.

    Events of the run record the target. A restart completes an interrupted export and does not repeat a complete one.
    """

    def __init__(
        self,
        config: Config,
        location: str,
        *,
        workdir: Path,
        checkpoint_workdir: Any,
        record_event: Callable[..., None],
    ):
        """
        Args:
            config: resolved config.
            location: value of `--workdir`, a directory or a URL.
            workdir: local directory of config, tokenizer, metrics and events.
            checkpoint_workdir: workdir of the checkpoints, either `workdir` or a path in a bucket.
            record_event: records an event of the run.

        Raises:
            InputError: `export.to` already contains files that this run did not export, or cannot be written.
        """
        self._workdir, self._checkpoint_workdir, self._record_event = workdir, checkpoint_workdir, record_event
        self._cache, self._architecture = config.data.cache_dir, config.export.architecture
        place = config.export.to or (f'{location.rstrip("/")}/{NAME}' if is_url(location) else str(workdir / NAME))
        remote = '' if config.export.to else config.checkpoint.remote_dir.rstrip('/')
        self._local = None if is_url(place) else Path(place).expanduser().resolve()
        url = place if self._local is None else f'{remote}/{NAME}' if remote else ''
        self._upload = Upload(KEY, url, cache=self._cache, last=CONFIG, folder=self._local) if url else None
        # The default directory keeps its name when the workdir is moved.
        local_names = [NAME if not config.export.to else str(self._local)] if self._local else []
        self._targets = [*local_names, *([display_path(url)] if url else [])]
        self._shown = ' and '.join([*([place] if self._local else []), *([display_path(url)] if url else [])])
        self._name = Path(config.export.to or location).name
        self._check_targets()

    def _check_targets(self) -> None:
        """Raises InputError unless the targets are new or exports of this run."""
        own = {name for event in self._events() for name in event.get('targets', ())}
        if self._local and self._targets[0] not in own:
            check_new(KEY, str(self._local))
        if self._upload and self._targets[-1] not in own:
            self._upload.check_new()

    def _events(self) -> list[dict[str, Any]]:
        return [
            event for event in read_events(self._workdir).lines if event.get('kind') in ('saved', 'export', 'exported')
        ]

    def _is_done(self, step: int) -> bool:
        """Returns True if the targets contain the checkpoint of `step`."""
        # After a save, the checkpoint may be another one of the same step.
        newest = (self._events() or [{}])[-1]
        if (newest.get('kind'), newest.get('step'), newest.get('targets')) != ('exported', step, self._targets):
            return False
        if self._upload:
            return self._upload.is_complete()
        return self._local is not None and (self._local / CONFIG).is_file()

    def export(self) -> None:
        """Exports the newest checkpoint, unless the target already contains it.

        Raises:
            InputError: a parameter cannot be converted, or the target cannot be written. The checkpoint is unchanged.
        """
        step = saved_steps(self._checkpoint_workdir)[-1]
        if self._is_done(step):
            logger.info(f'the model of step {step} is already exported: {self._shown}')
            return
        try:
            self._export(step)
        except InputError as error:
            raise InputError(
                f'{error}; the run is complete and its checkpoint of step {step} is saved: run the same command again '
                'to export it'
            ) from error

    def _export(self, step: int) -> None:
        # Other files may have appeared during the run.
        self._check_targets()
        directory = self._upload.folder if self._upload else self._local
        assert directory
        self._record_event('export', f'exporting to {self._shown}', step=step, targets=self._targets)
        # Remove an older export of this run, and files of a killed attempt.
        for path in (directory, *directory.parent.glob(f'.{directory.name}.*.partial')):
            shutil.rmtree(path, ignore_errors=True)
        if self._upload:
            self._upload.begin()
            self._upload.reopen()
        exported = export_model(
            str(find_local_step(f'{self._checkpoint_workdir}@{step}', cache=self._cache)),
            str(directory),
            architecture=self._architecture,
            dtype=AUTO,
            max_shard_size=MAX_SHARD_BYTES,
            show=True,
            workdir=self._workdir,
            name=self._name,
        )
        if self._upload:
            self._upload.finish(show=True)
        text = (
            f'exported {exported.class_name} of {exported.parameters:,} parameters ({format_bytes(exported.bytes)} in '
            f'{exported.dtype}) to {self._shown}'
        )
        logger.info(text)
        self._record_event('exported', text, step=step, targets=self._targets)
