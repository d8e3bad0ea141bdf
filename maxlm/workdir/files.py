"""File names in a workdir, and checks that a run can resume with a config.

WORKDIR/config.json  tokenizer.json  [text_boundaries.json  chat_template.jinja]  metrics.jsonl  run.log  tensorboard/
        checkpoints/<step>/
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from maxlm.config.schema import Config
from maxlm.config.serialization import from_json, to_json
from maxlm.errors import InputError, os_message
from maxlm.storage.atomic import replace_file
from maxlm.storage.check_directory import check_entries
from maxlm.storage.filesystem import display_path, is_url, read_bytes
from maxlm.storage.regular_files import MAX_TEXT_BYTES, read_text

CONFIG = 'config.json'
TOKENIZER = 'tokenizer.json'
# Exists with the tokenizers of other models.
TEXT_BOUNDARIES = 'text_boundaries.json'
# Exists in runs on conversations.
CHAT_TEMPLATE = 'chat_template.jinja'
METRICS_FILE = 'metrics.jsonl'
SAMPLES_FILE = 'samples.jsonl'
EXPERT_LOADS_FILE = 'expert_loads.jsonl'
ATTENTION_FILE = 'attention.json'
EVENTS_FILE = 'events.jsonl'
WANDB_ID_FILE = 'wandb_id'
# Written by `maxlm evaluate`. The report shows the file in this directory of a workdir.
EVALUATION_DIR = 'evaluation'
EVALUATION_FILE = 'evaluation.json'
# Hugging Face files that an imported workdir keeps, so that an export writes them again.
TOKENIZER_CONFIG = 'tokenizer_config.json'
SPECIAL_TOKENS = 'special_tokens_map.json'
GENERATION = 'generation_config.json'
# The config.json of the imported model, whose name is that of the run's config.
HF_CONFIG = 'hf_config.json'
EXPORT_FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE, GENERATION)
# Files that belong to the model, in addition to its config.
MODEL_FILES = (TOKENIZER, TEXT_BOUNDARIES, HF_CONFIG, *EXPORT_FILES)


def goodput_name(process: int) -> str:
    """Returns the name of the goodput log of a process."""
    return f'goodput-{process}.jsonl' if process else 'goodput.jsonl'


def open_workdir(workdir: Path) -> None:
    """Creates the workdir if it is missing.

    Raises:
        InputError: the workdir cannot be written.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # Test by writing, because permission bits do not show quotas or read-only mounts.
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise _workdir_error(workdir, error) from error


def check_same_model(workdir: Path, config: Config) -> None:
    """Checks that the run in a workdir, if any, can resume with a config.

    Raises:
        InputError: the run is of another model.
    """
    if not (workdir / CONFIG).exists():
        return
    if found := model_difference(read_config(workdir), config):
        key, before, now = found
        raise InputError(
            f'--workdir={workdir} contains a run with {key}={before}, but the config has {now}; choose another '
            f'--workdir or set {key}={before}'
        )


# Keys of the model that follow from another key.
_SET_BY = {'value_head': ('grpo', 'advantage_estimator'), 'reward_head': ('train', 'objective')}


def model_difference(old_config: Config, new_config: Config) -> tuple[str, Any, Any] | None:
    """Returns the first key in which the models of two configs differ, with both values, or None."""
    old, new = old_config.model, new_config.model
    # These keys may change between two attempts: they set initialization, regularization, precision and implementation.
    ignored = {'family', 'remat_policy', 'scan_layers', 'attention', 'matmul_precision', 'dtype', 'dropout'}
    ignored |= {'init', 'init_std', 'norm_kernel', 'fp8_kernel'}
    for field in dataclasses.fields(new):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if field.name not in ignored and before != now:
            for section, key in [_SET_BY.get(field.name, ('model', field.name)), ('model', field.name)]:
                values = [getattr(getattr(config, section), key) for config in (old_config, new_config)]
                if values[0] != values[1]:
                    return f'{section}.{key}', values[0], values[1]
    return None


def write_run_files(workdir: Path, config: Config, tokenizer: Path) -> None:
    """Writes the resolved config, the tokenizer, its boundaries and its chat template into the workdir of a new run."""
    # The copies may be uploaded, so no file outside the directory is copied.
    check_entries(tokenizer.parent, (tokenizer.name, TEXT_BOUNDARIES, CHAT_TEMPLATE))
    # The file keeps secrets, because a run can resume with it. Others must not read them.
    text = to_json(config, with_secrets=True)
    try:
        replace_file(workdir / CONFIG, text, is_private=text != to_json(config))
        shutil.copyfile(tokenizer, workdir / TOKENIZER)
        for name in (TEXT_BOUNDARIES, CHAT_TEMPLATE):
            if (path := tokenizer.with_name(name)).is_file():
                shutil.copyfile(path, workdir / name)
    except OSError as error:
        raise _workdir_error(workdir, error) from error


def read_config(workdir: str | os.PathLike[str]) -> Config:
    """Returns the resolved config of a run in a directory or a bucket.

    Raises:
        InputError: the config is missing or not valid, or a file next to it is a special file or links outside the
            workdir.
    """
    path = f'{workdir}/{CONFIG}'
    check_entries(workdir, (CONFIG, *MODEL_FILES))
    try:
        return from_json(read_bytes(path, limit=MAX_TEXT_BYTES).decode() if is_url(path) else read_text(path))
    except OSError as error:
        raise InputError(f'{path}: {os_message(error)}; choose a workdir of maxlm train') from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        shown = display_path(path)
        raise InputError(
            f'{shown}: not a valid config of this version of maxlm ({error}); use the version that wrote it'
        ) from error


def _workdir_error(workdir: Path, error: OSError) -> InputError:
    return InputError(f'--workdir={workdir}: {os_message(error)}; choose a writable directory')
