"""Annotations that declare config keys.

The field of a section is the only declaration of its key: the annotation gives the type, the allowed values and the
former names, and the comment above it is the help text. `maxlm.config.keys` reads the annotations for parsing,
validation, completion and error messages; the reference page also contains the comments.

    moment_dtype: Literal['float32', 'bfloat16', 'int8'] = 'float32'
    family: Annotated[str, Choices(tuple(FAMILIES))] = 'gpt2'
    weight_decay: Annotated[float, Range(0, 10)] = 0.1
    max_grad_norm: Annotated[float, Range(0, 1e9), Renamed('clip_norm')] = 1.0
    logits_dir: Annotated[str, PathOption(Kind.DIRECTORY)] = 'data/logits'
    reward: Literal['exact', 'numeric'] | FunctionName = 'exact'
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from maxlm.storage.paths import Kind, PathOption


class Choices(NamedTuple):
    """Values of a key that are the names of a table. Other choices are a `Literal`."""

    values: tuple[Any, ...]


class Form(enum.Enum):
    """Special values that a key accepts, or properties of its values."""

    # The text 'auto' in addition to integers, stored as `maxlm.config.schema.AUTO`.
    OR_AUTO = 'auto'
    # The name of a function or class of the user, 'package.module:function'.
    FUNCTION = 'package.module:function'
    # A text that may contain secrets, which only the config.json in the workdir contains.
    SECRET = 'secret'


# Alone, or as an alternative to the choices of a `Literal`.
FunctionName = Annotated[str, Form.FUNCTION]
# A checkpoint of another run: WORKDIR, WORKDIR@STEP or the directory of a step; '' = none.
_FETCH = 'fetch it with `maxlm checkpoints fetch` and give the directory'
CheckpointPath = Annotated[str, PathOption(Kind.DIRECTORY, ('gs',), may_be_empty=True, advice=_FETCH)]


class Renamed(NamedTuple):
    """Former name of a key, which remains valid until release 0.3.

    Attributes:
        name: former name, with its section if that was another one.
        values: former values that were renamed too, and their current names.
        least: lower limit of the values of the current key.
        was_bool: True if the former key was a switch: its values are 0 and 1 of the current key.
    """

    name: str
    values: Mapping[str, str] = MappingProxyType({})
    least: int | None = None
    was_bool: bool = False


class ValueBefore(NamedTuple):
    """Value of a key that the config.json files of earlier versions do not have.

    It differs from the default, which has changed the meaning of a run since.
    """

    value: Any
