"""Merges the config.json of an imported model into the config.json of its export.

The import keeps the file in the workdir, and runs that start from the import copy it. Keys that maxlm does not know
keep their values, and so do keys whose meaning has not changed since the import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.data.tokenizer.model_files import read_json_object
from maxlm.errors import InputError
from maxlm.huggingface.architectures.architecture import Architecture
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.config_conversion import AUTO, from_config, to_config, unsupported_settings
from maxlm.huggingface.tensors.export_dtypes import DEFAULT_DTYPE, SAFETENSORS_DTYPES
from maxlm.log import logger
from maxlm.workdir.files import HF_CONFIG

# Versions of Transformers before 4.56 read only the former name, and later versions read both.
_FORMER_DTYPE_KEY, _DTYPE_KEYS = 'torch_dtype', ('dtype', 'torch_dtype')
_NAME_KEY = '_name_or_path'
_HUB_NAME = re.compile(r'\w[\w.-]*/\w[\w.-]*')
# Directories of the cache of the Hugging Face Hub, and downloads named like them.
_HUB_DIRECTORY = re.compile(r'(?:models--)?(\w[\w.-]*?)--(\w[\w.-]*)')


def kept_config(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the content of `hf_config.json` for an import: config.json, with the model's name if it is known.

    Args:
        values: content of config.json.
        directory: its directory.
    """
    folder = directory.resolve()
    name = folder.parent.parent.name if folder.parent.name == 'snapshots' else folder.name
    match = _HUB_DIRECTORY.fullmatch(name)
    return {**({_NAME_KEY: f'{match[1]}/{match[2]}'} if match and not values.get(_NAME_KEY) else {}), **values}


def read_original(workdir: Path) -> dict[str, Any]:
    """Returns the config.json of the imported model of a workdir; {} if there is none.

    Raises:
        InputError: the file is corrupt.
    """
    return read_json_object(workdir / HF_CONFIG)


def base_model(original: Mapping[str, Any]) -> str:
    """Returns the name of the imported model on the Hugging Face Hub; '' if it is unknown."""
    name = original.get(_NAME_KEY)
    is_name = isinstance(name, str) and _HUB_NAME.fullmatch(name) and not re.search(r'/checkpoint-\d+$', name)
    return str(name) if is_name else ''


def choose_dtype(dtype: str, original: Mapping[str, Any]) -> str:
    """Returns the dtype of an export; `auto` is that of the imported model, or bfloat16 for other models."""
    if dtype != AUTO or not original:
        return DEFAULT_DTYPE if dtype == AUTO else dtype
    # The default of Transformers is float32.
    stored = next((str(original[key]) for key in _DTYPE_KEYS if original.get(key)), 'float32').removeprefix('torch.')
    return stored if stored in SAFETENSORS_DTYPES else DEFAULT_DTYPE


def original_architecture(original: Mapping[str, Any], model: ModelConfig) -> str:
    """Returns the model_type of the imported model if it still expresses the model, otherwise `auto`."""
    row = ARCHITECTURES.get(original.get('model_type', ''))
    return row.model_type if row and not unsupported_settings(model, row) else AUTO


def export_config(
    original: Mapping[str, Any],
    model: ModelConfig,
    row: Architecture,
    *,
    ids: Mapping[str, Any],
    dtype: str,
    is_trained: bool,
) -> dict[str, Any]:
    """Returns the config.json of an export.

    Args:
        original: config.json of the imported model; {} if there is none.
        model: resolved model.
        row: architecture of the export.
        ids: ids of special tokens that the tokenizer's files give.
        dtype: dtype of the tensors.
        is_trained: the parameters are not those of the import, so the tokens may differ too.
    """
    written = to_config(model, row.model_type)
    if original.get('model_type') != row.model_type:
        return {**written, **ids, _FORMER_DTYPE_KEY: dtype}
    try:
        before = to_config(from_config(original, HF_CONFIG), row.model_type)
    except InputError as error:
        logger.warning(f'{error}; config.json is written without the keys of the imported model')
        return {**written, **ids, _FORMER_DTYPE_KEY: dtype}
    # The weights are not quantized any more, and the custom code of the original is not exported.
    merged = {key: value for key, value in original.items() if key not in ('quantization_config', 'auto_map')}
    merged |= {key: value for key, value in written.items() if key not in before or before[key] != value}
    merged['architectures'] = written['architectures']
    keys = [key for key in _DTYPE_KEYS if key in original] or [_FORMER_DTYPE_KEY]
    merged |= dict.fromkeys(keys, dtype)
    if from_config(merged, HF_CONFIG) != from_config({**written, **dict.fromkeys(keys, dtype)}, HF_CONFIG):
        # A changed key has another name in the original, which takes precedence.
        merged = {**merged, **written}
        merged = {key: merged[key] for key in merged if key in written or key not in row.aliases}
    if is_trained:
        merged |= {key: value for key, value in ids.items() if value is not None}
    return merged
