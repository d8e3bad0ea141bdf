"""Labels that mark an answer as good or bad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Key of the label in a record, and texts of labels in lower case.
LABEL = 'label'
_TEXTS = {'true': True, '1': True, 'false': False, '0': False}


def parse_label(entry: Mapping[str, Any]) -> bool | None:
    """Returns True for a good answer, False for a bad answer, and None if the record has no label.

    A label is a boolean, the number 0 or 1, or one of the texts `true`, `false`, `0` and `1` in any case.

    Raises:
        ValueError: the value is no label.
    """
    value = entry.get(LABEL)
    if value is None:
        return None
    if isinstance(value, str):
        label = _TEXTS.get(value.strip().lower())
    else:
        label = bool(value) if isinstance(value, int | float) and value in (0, 1) else None
    if label is None:
        raise ValueError(
            f'{LABEL!r} is {repr(value)[:80]}, which marks an answer neither as good nor as bad; use true or false, or '
            f'rename the field if it has another meaning'
        )
    return label


def refuse_label(entry: Mapping[str, Any]) -> None:
    """Raises ValueError if a record for supervised training has a label."""
    if parse_label(entry) is not None:
        raise ValueError(
            f'{LABEL!r} marks completions as good or bad, and bad completions must not be imitated; use '
            '--format=preference and train with dpo.loss_type=kto, or remove them'
        )
