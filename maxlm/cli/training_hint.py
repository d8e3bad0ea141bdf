"""Command that continues with a prepared data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maxlm.config.schema import Config, DataConfig, DistillConfig, DpoConfig, TrainConfig
from maxlm.data.chat.packing import num_labeled
from maxlm.data.dataset.records import DatasetManifest
from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json
from maxlm.workdir.files import CONFIG, read_config
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR

# Stands for the workdir of the model that answers are compared with, if the tokenizer does not name it.
PLACEHOLDER = 'WORKDIR'
# Length and batch of a run from an imported model, whose config has none.
FIRST_RUN = {'train.num_epochs': 1, 'train.global_batch_size': 8}
# Rank of the adapters of a quantized model, which cannot be trained without adapters.
LORA_RANK = 16


def training_command(
    output: str | Path, what: str, window: int, *, tokenizer: str = '', dataset: DatasetManifest | None = None
) -> list[str]:
    """Returns a command that trains on a prepared data set, or that imports the model to train.

    Post-training starts from the model of the workdir that contains the tokenizer, with the config of this model.
    Without such a workdir, conversations train a new model.

    Args:
        output: path or URL of the data set.
        what: format of the records: text, chat or preference.
        window: length of packed sequences; 0 = not packed.
        tokenizer: value of `--tokenizer`.
        dataset: manifest of the data set; None = unknown.
    """
    name = Path(str(output)).name
    base = Path(tokenizer).parent if what != 'text' and Path(tokenizer).is_file() else None
    if base is not None and _is_transformers(base):
        return ['maxlm', 'hf', 'import', f'--input={base}', f'--output=runs/{base.absolute().name}']
    config = None if base is None else _config_of(base)
    changes: dict[str, Any] = {'data.path': output}
    if window:
        changes['data.seq_len'] = window
    if what == 'preference':
        changes['train.objective'] = 'dpo'
        if dataset is not None and num_labeled(dataset.chat):
            changes['dpo.loss_type'] = 'kto'
    start = 'tiny'
    if config is not None:
        changes |= _changes(config, changes, dataset)
        changes['train.init_from'], start = base, f'{base}/{CONFIG}'
    elif what == 'preference':
        changes['train.init_from'], start = PLACEHOLDER, f'{PLACEHOLDER}/{CONFIG}'
    settings = (f'--config.{key}={value}' for key, value in changes.items())
    return ['maxlm', 'train', f'--config={start}', f'--workdir=runs/{name}', *settings]


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


def _changes(config: Config, overrides: dict[str, Any], dataset: DatasetManifest | None) -> dict[str, Any]:
    """Returns the keys of the model's own run that a run on the data set must change."""
    train, data = config.train, config.data
    changes: dict[str, Any] = {}
    if dataset is not None and 0 < config.model.vocab_size < dataset.vocab_size:
        # 0 = the size of the data set, whose tokenizer has new tokens.
        changes['model.vocab_size'] = 0
    if config.model.weight_quantization != 'float' and not config.model.lora_rank:
        changes['model.lora_rank'] = LORA_RANK
    if not any((train.num_steps, train.num_tokens, train.num_epochs, train.hours, train.dollars)):
        changes |= FIRST_RUN
    elif not (train.global_batch_size or train.global_batch_size_tokens):
        changes['train.global_batch_size'] = FIRST_RUN['train.global_batch_size']
    defaults: dict[str, tuple[Any, Any]] = {
        'train.objective': (train.objective, overrides.get('train.objective', TrainConfig.objective)),
        'train.loss': (train.loss, TrainConfig.loss),
        'data.sources': (data.sources, DataConfig.sources),
        'data.sources_schedule': (data.sources_schedule, DataConfig.sources_schedule),
        'data.seq_len_schedule': (data.seq_len_schedule, DataConfig.seq_len_schedule),
        'distill.teacher': (config.distill.teacher, DistillConfig.teacher),
        'distill.logits_dir': (config.distill.logits_dir, DistillConfig.logits_dir),
    }
    if 'train.objective' in overrides:
        defaults['dpo.loss_type'] = (config.dpo.loss_type, overrides.get('dpo.loss_type', DpoConfig.loss_type))
    return changes | {key: value for key, (found, value) in defaults.items() if found != value}
