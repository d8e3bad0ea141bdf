"""Which model is meant by what was given: a step of a workdir, its best one, or a directory of Transformers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from maxlm.checkpoint.listing import resolve_checkpoint
from maxlm.errors import InputError
from maxlm.huggingface.import_model import import_model
from maxlm.log import logger
from maxlm.storage.filesystem import display_path, is_url
from maxlm.training.retention import SavedStep, best_step
from maxlm.workdir.files import CONFIG
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, split_name


@contextlib.contextmanager
def found_checkpoint(given: str) -> Iterator[str]:
    """What `load_model` takes: of a workdir its step of the lowest validation loss, else the newest.

    A directory of Transformers is imported into a temporary workdir, which is there while entered.

    Raises:
        InputError: there is no such model.
    """
    if _is_hugging_face(given):
        with tempfile.TemporaryDirectory(prefix='maxlm-serve-') as folder:
            workdir = Path(folder) / 'imported'
            logger.info(f'{given} is imported into {workdir}; `maxlm hf import` does it once for all starts')
            try:
                done = import_model(given, str(workdir), show=True)
            except InputError as error:
                raise InputError(str(error).replace('--input=', '--checkpoint=')) from error
            logger.info(f'{given}: {done.class_name} of {done.parameters:,} parameters')
            yield str(workdir)
        return
    yield _best(given)


def name_of(given: str) -> str:
    """The name to serve a model under: that of its directory."""
    path = Path(split_name(given)[0])
    if path.parent.name == CHECKPOINTS_DIR:
        path = path.parent.parent
    return (path if is_url(given) else path.resolve()).name or 'model'


def _best(given: str) -> str:
    workdir, wanted = split_name(given)
    path = Path(workdir)
    if wanted or (path.name.isdigit() and path.parent.name == CHECKPOINTS_DIR):
        return given
    steps = resolve_checkpoint(given).steps
    best = best_step(SavedStep(one.step, one.validation_loss) for one in steps)
    if best is None:
        logger.info(f'{display_path(workdir)}: no step has a validation loss; the newest, {steps[-1].step}, is served')
        return f'{workdir}@{steps[-1].step}'
    logger.info(
        f'{display_path(workdir)}: step {best} has the lowest validation loss and is served; @STEP chooses another'
    )
    return f'{workdir}@{best}'


def _is_hugging_face(given: str) -> bool:
    """Whether weights of Transformers lie there, and no checkpoints of a run."""
    directory = Path(given).expanduser()
    return (
        not is_url(given)
        and (directory / CONFIG).is_file()
        and not (directory / CHECKPOINTS_DIR).is_dir()
        and any(directory.glob('*.safetensors'))
    )
