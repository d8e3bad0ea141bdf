"""The directory of a run: what lies in it under which name, and whether a config may go on in it.

WORKDIR/config.json  tokenizer.json  [chat_template.jinja]  metrics.jsonl  run.log  tensorboard/  checkpoints/<step>/
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

from maxlm.config.loading import from_json, to_json
from maxlm.config.schema import Config
from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import replace_file
from maxlm.storage.check_directory import check_entries
from maxlm.storage.regular_files import read_text

CONFIG = 'config.json'
TOKENIZER = 'tokenizer.json'
# Of a run on conversations.
CHAT_TEMPLATE = 'chat_template.jinja'
METRICS_FILE = 'metrics.jsonl'
SAMPLES_FILE = 'samples.jsonl'
EVENTS_FILE = 'events.jsonl'
WANDB_ID_FILE = 'wandb_id'
# Hugging Face files that an imported workdir keeps, so that an export writes them again.
TOKENIZER_CONFIG = 'tokenizer_config.json'
SPECIAL_TOKENS = 'special_tokens_map.json'
GENERATION = 'generation_config.json'
EXPORT_FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE, GENERATION)


def goodput_name(process: int) -> str:
    """Returns the name of the goodput log of a process."""
    return f'goodput-{process}.jsonl' if process else 'goodput.jsonl'


def open_workdir(workdir: Path) -> None:
    """Makes the directory if need be.

    Raises:
        InputError: it cannot be written to.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # Whether a directory is writable shows by writing: permission bits say nothing of quotas or read-only mounts.
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise _workdir_error(workdir, error) from error


def check_same_model(workdir: Path, config: Config) -> None:
    """Checks that the run that a workdir holds, if any, can go on with a config.

    Raises:
        InputError: it is one of another model.
    """
    if not (workdir / CONFIG).exists():
        return
    if found := model_difference(read_config(workdir), config):
        key, before, now = found
        raise InputError(
            f'--workdir={workdir} holds a run with {key}={before}, the config has {now}; '
            f'choose another --workdir or set {key}={before}'
        )


def model_difference(old_config: Config, new_config: Config) -> tuple[str, Any, Any] | None:
    """Returns the first key by which the models of two configs differ, and its values; None if they are equal."""
    old, new = old_config.model, new_config.model
    # How the same function of the same parameters is computed may change between two attempts of a run.
    ignored = {'family', 'remat_policy', 'scan_layers', 'attention', 'matmul_precision', 'dtype', 'dropout'}
    ignored |= {'init', 'init_std'}
    for field in dataclasses.fields(new):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if field.name not in ignored and before != now:
            return f'model.{field.name}', before, now
    return None


def write_run_files(workdir: Path, config: Config, tokenizer: Path) -> None:
    """Puts the resolved config, the tokenizer and the chat template beside it into the workdir of a run that starts."""
    try:
        replace_file(workdir / CONFIG, to_json(config))
        shutil.copyfile(tokenizer, workdir / TOKENIZER)
        if (template := tokenizer.with_name(CHAT_TEMPLATE)).is_file():
            shutil.copyfile(template, workdir / CHAT_TEMPLATE)
    except OSError as error:
        raise _workdir_error(workdir, error) from error


def read_config(workdir: Path) -> Config:
    """The resolved config of a run.

    Raises:
        InputError: there is none, it is not one, or a file beside it is a special file or a link that leads elsewhere.
    """
    path = workdir / CONFIG
    check_entries(workdir, (CONFIG, TOKENIZER, CHAT_TEMPLATE))
    try:
        return from_json(read_text(path))
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; give a workdir of maxlm.train') from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f'{path}: not a config that this version of maxlm wrote ({error})') from error


def _workdir_error(workdir: Path, error: OSError) -> InputError:
    return InputError(f'--workdir={workdir}: {os_message(error)}; choose a directory that can be written to')
