"""Command that continues with a prepared data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maxlm.config.schema import Config
from maxlm.data.chat.packing import num_labeled
from maxlm.data.dataset.records import DatasetManifest
from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json
from maxlm.workdir.files import CONFIG, TOKENIZER, read_config
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR

# Stands for the workdir of the model that answers are compared with, if no run has the tokenizer.
PLACEHOLDER = 'WORKDIR'
# Directory of the workdirs that the commands of the documentation create.
RUNS = Path('runs')
# Rank of the adapters of a quantized model, which cannot be trained without adapters.
LORA_RANK = 16
# Parameters with a row for each token.
NEW_ROWS = ('embedding', 'head')


def training_command(
    output: str | Path, what: str, window: int, *, tokenizer: str = '', dataset: DatasetManifest | None = None
) -> list[str]:
    """Returns a command that trains on a prepared data set, or that imports the model to train.

    Post-training starts from the model of the workdir that contains the tokenizer, or of the newest run in `runs` with
    the same tokenizer. Without such a workdir, conversations train a new model.

    Args:
        output: path or URL of the data set.
        what: format of the records: text, chat, preference, or auto for texts and conversations.
        window: length of packed sequences; 0 = not packed.
        tokenizer: value of `--tokenizer`.
        dataset: manifest of the data set; None = unknown.
    """
    name = Path(str(output)).name
    base = _base_of(Path(tokenizer)) if what != 'text' and Path(tokenizer).is_file() else None
    if base is not None and _is_transformers(base):
        return ['maxlm', 'hf', 'import', f'--input={base}', f'--output=runs/{base.absolute().name}']
    config = None if base is None else _config_of(base)
    changes: dict[str, Any] = {'data.path': output}
    if window:
        changes['data.seq_len'] = window
    if what == 'preference' and dataset is not None and num_labeled(dataset.chat):
        changes['dpo.loss_type'] = 'kto'
    start = 'finetune:dpo' if what == 'preference' else 'tiny' if config is None else 'finetune'
    if start != 'tiny':
        changes['train.init_from'] = PLACEHOLDER if config is None else base
    if config is not None and config.model.weight_quantization != 'float' and not config.model.lora_rank:
        changes['model.lora_rank'] = LORA_RANK
        if dataset is not None and config.model.vocab_size < dataset.vocab_size:
            # The rows of new tokens are not part of the adapters.
            changes['optimizer.trainable_params'] = ('embedding',) if config.model.tie_embeddings else NEW_ROWS
    settings = (f'--config.{key}={value}' for key, value in changes.items())
    return ['maxlm', 'train', f'--config={start}', f'--workdir=runs/{name}', *settings]


def _base_of(tokenizer: Path) -> Path:
    """Returns the directory of the model whose tokenizer a file is, or the file's directory if there is none."""
    if _has_model(tokenizer.parent):
        return tokenizer.parent
    content = tokenizer.read_bytes()
    runs = [path for path in RUNS.glob(f'*/{TOKENIZER}') if path.read_bytes() == content and _has_model(path.parent)]
    newest = max(runs, key=lambda path: path.stat().st_mtime, default=tokenizer)
    return newest.parent


def _has_model(directory: Path) -> bool:
    return (directory / CHECKPOINTS_DIR).is_dir() or _is_transformers(directory)


def _is_transformers(directory: Path) -> bool:
    """Returns True for a directory with a model in the format of Transformers, which is not imported yet."""
    try:
        values = parse_json((directory / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and 'model_type' in values and any(directory.glob('*.safetensors'))


def _config_of(workdir: Path) -> Config | None:
    """Returns the config of a workdir with checkpoints, or None for other directories."""
    if not (workdir / CHECKPOINTS_DIR).is_dir():
        return None
    try:
        return read_config(workdir)
    except InputError:
        return None
