"""Reward models in Transformers: classes ForSequenceClassification with one label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.huggingface.architectures.architecture import Architecture

_CLASS = 'ForSequenceClassification'
# Architectures whose class is not named like that of the language model; '' = Transformers has no class.
_PREFIXES = {'gemma3_text': 'Gemma3Text', 'granite': '', 'nanochat': ''}


def class_name_of(row: Architecture, model: ModelConfig) -> str:
    """Returns the class of Transformers for a model. InputError if it is a reward model and there is no such class."""
    if not model.reward_head:
        return row.class_name
    name = row.class_name.removesuffix('ForCausalLM').removesuffix('LMHeadModel')
    prefix = _PREFIXES.get(row.model_type, name)
    if not prefix:
        raise InputError(
            f'model.reward_head=True: Transformers has no reward models of the architecture {row.model_type}; choose '
            'another --architecture'
        )
    return f'{prefix}{_CLASS}'


def label_keys(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that give the number of labels: one for a reward model."""
    return {'id2label': {'0': 'LABEL_0'}, 'label2id': {'LABEL_0': 0}} if model.reward_head else {}


def padded_for_scores(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of an export, without a padding token of a reward model that can end an answer.

    Transformers scores the last token that is not padding. If answers may end with the padding token, it would silently
    score another token. Without a padding token, it refuses batches.
    """
    ends = config.get('eos_token_id')
    is_end = config.get('pad_token_id') in (ends if isinstance(ends, list) else [ends])
    return {**config, 'pad_token_id': None} if model.reward_head and is_end else config


def is_reward_model(config: Mapping[str, Any], source: str) -> bool:
    """Returns True if the content of the config.json `source` is that of a reward model.

    Raises:
        InputError: the model classifies sequences, but has not exactly one label.
    """
    names = config.get('architectures')
    if not isinstance(names, list) or not names or not str(names[0]).endswith(_CLASS):
        return False
    labels = config.get('id2label')
    # Two labels are the default of Transformers.
    num_labels = len(labels) if isinstance(labels, dict) else config.get('num_labels', 2)
    if num_labels != 1:
        raise InputError(
            f'{source}: {names[0]} has {num_labels} labels (id2label); a reward model has 1; use a language '
            'model, or a classifier with one label'
        )
    return True


def check_language_model(model: ModelConfig, what: str) -> None:
    """Raises InputError if a model is a reward model, which `what` cannot express."""
    if model.reward_head:
        raise InputError(f'model.reward_head=True: {what} cannot express reward models; use `maxlm hf export`')
