"""Config keys as the fields of the sections declare them: their types, values and former names."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from maxlm.config.schema import AUTO, SECTIONS, Config
from maxlm.config.sections.declaration import Choices, Form, Renamed, ValueBefore
from maxlm.config.sections.ranges import Range, show_number
from maxlm.config.user_function import is_function_name
from maxlm.errors import InputError, nearest
from maxlm.storage.paths import ANY, PathOption, check_key

_EXAMPLES: dict[type, str] = {
    bool: 'true or false',
    int: 'an integer',
    float: 'a number',
    str: 'a string',
    tuple: "a tuple, e.g. (('a', 0.5), ('b', 0.5))",
}
_WORDS = {'true': True, '1': True, 'yes': True, 'false': False, '0': False, 'no': False}
_Marker = TypeVar('_Marker')


class Key(NamedTuple):
    """Declaration of a config key.

    Attributes:
        section, name: `section.name` is the name on the command line.
        kind: type of the values: bool, int, float, str or tuple.
        default: default value; None = set by the model family.
        choices: allowed values; () = not limited to these.
        range: range of a number.
        path: kind and protocols of a path. In a tuple, of each entry or of its first part.
        forms: special values and properties.
        renamed: former names, each with its section.
        value_before: value in files that do not have the key, if it is not the default.
    """

    section: str
    name: str
    kind: type
    default: Any
    choices: tuple[Any, ...]
    range: Range | None
    path: PathOption | None
    forms: frozenset[Form]
    renamed: Mapping[str, Renamed]
    value_before: ValueBefore | None

    def __str__(self) -> str:
        return f'{self.section}.{self.name}'

    def of(self, config: Config) -> Any:
        """Returns the value of the key."""
        return getattr(getattr(config, self.section), self.name)

    def parse(self, text: str) -> Any:
        """Returns the value of a text on the command line. Raises InputError if it has another type."""
        if text == 'auto' and Form.OR_AUTO in self.forms:
            return text
        try:
            if self.kind is bool:
                return _WORDS[text.lower()]
            if self.kind is tuple:
                value = ast.literal_eval(text)
                if not isinstance(value, tuple):
                    raise ValueError
                return value
            if self.kind is int:
                number = float(text) if set(text) & set('eE.') else int(text)
                if number != int(number):
                    raise ValueError
                return int(number)
            return self.kind(text)
        except (ValueError, KeyError, OverflowError, SyntaxError, TypeError):
            auto = ' or auto' if Form.OR_AUTO in self.forms else ''
            raise InputError(f'{self}={text!r}: must be {_EXAMPLES[self.kind]}{auto}') from None

    def from_json(self, value: Any) -> Any:
        """Returns the value of a JSON value, which has lists instead of tuples. Raises InputError for other types."""
        if self.kind is float and type(value) is int:
            value = float(value) if abs(value) < 10**300 else math.inf
        if self.kind is tuple and isinstance(value, list):
            value = _as_tuples(value)
        if type(value) is not self.kind:
            raise InputError(f'{self}={json.dumps(value)}: must be {_EXAMPLES[self.kind]}')
        return value

    def without_auto(self, value: Any) -> Any:
        """Returns the value of a config file with AUTO for 'auto'. Raises InputError for other texts."""
        if Form.OR_AUTO in self.forms and value != 'auto' and type(value) is not int:
            raise InputError(f"{self}={value!r}: must be {_EXAMPLES[int]} or 'auto'")
        return AUTO if Form.OR_AUTO in self.forms and value == 'auto' else value

    def check(self, value: Any) -> None:
        """Checks a value independently of other keys; `checked_path` checks paths.

        Raises:
            InputError: the value has another type, is outside the range, NaN or infinite, or none of the choices.
        """
        names = [str(choice) or "''" for choice in self.choices]
        # A Python config can set any key to None, and any value in a ConfigDict of its own.
        has_kind = isinstance(value, (int, float) if self.kind is float else self.kind)
        if not has_kind:
            expected = _EXAMPLES[self.kind] if names in ([], ["''"]) else f'one of {", ".join(names)}'
            raise InputError(f'{self}={value!r}: must be {expected}')
        if self.range is not None and value not in self.range:
            finite = '' if abs(value) < math.inf else 'finite, '
            raise InputError(f'{self}={show_number(value)}: must be {finite}{self.range}')
        takes_function = Form.FUNCTION in self.forms
        if value in self.choices or (takes_function and is_function_name(value)):
            return
        if takes_function and (':' in value or names in ([], ["''"])):
            raise InputError(f'{self}={value}: must have the form package.module:name, e.g. my_module:Mine')
        if names:
            close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
            hint = f'; did you mean {close[0]!r}?' if close else ''
            function = ', or a function of yours as package.module:name' if takes_function else ''
            raise InputError(f'{self}={value!r}: must be one of {", ".join(names)}{function}{hint}')

    def checked_path(self, value: Any) -> Any:
        """Returns a path with `~` expanded, and without `file://` unless other URLs are accepted too.

        Raises:
            InputError: a path or URL is invalid regardless of the other keys.
        """
        if self.path is None:
            return value
        if isinstance(value, tuple):
            for entry in value:
                check_key(str(self), entry[0] if isinstance(entry, tuple) else entry, self.path)
            return value
        path = check_key(str(self), value, self.path)
        # A dataset at file:// is fetched like a dataset in a bucket.
        return value if self.path.urls == ANY and value.startswith('file://') else path


def declared_keys() -> Mapping[str, Key]:
    """Returns the declarations of all keys by `section.key`, in the order of the schema."""
    return _read(tuple(SECTIONS.items()))


def section_keys(section: str) -> Mapping[str, Key]:
    """Returns the declarations of the keys of a section by name. Raises InputError if there is no such section."""
    if section not in SECTIONS:
        raise InputError(f'config section {section!r} does not exist; {section_hint(section)}')
    return _read_section(section, SECTIONS[section])


def section_hint(name: str) -> str:
    """Returns the remedy for a section that does not exist, which may be a key without its section."""
    keys = [f'{section}.{name}' for section in SECTIONS if name in section_keys(section)]
    return f'did you mean {" or ".join(map(repr, keys))}?' if keys else nearest(name, SECTIONS)


def find_keys(section: str, names: Collection[str]) -> dict[str, Key]:
    """Returns the declarations of some keys of a section by name. Raises InputError if one does not exist."""
    keys = section_keys(section)
    for name in names:
        if name not in keys:
            elsewhere = [f'{other}.{name}' for other in SECTIONS if name in section_keys(other)]
            hint = f'did you mean {elsewhere[0]!r}?' if elsewhere else nearest(name, keys)
            raise InputError(f'config key {section}.{name} does not exist; {hint}')
    return {name: keys[name] for name in names}


def check_values(config: Config) -> None:
    """Checks each value alone. Raises InputError."""
    for key in declared_keys().values():
        key.check(key.of(config))


def current_key(name: str, value: Any = None) -> tuple[str, Any]:
    """Returns the current name and value of a config key `section.key` that may be a former one."""
    former = _former(tuple(SECTIONS.items()))
    if name not in former:
        return name, value
    key, renamed = former[name]
    if renamed.was_bool:
        value = _number_of_switch(value)
    elif isinstance(value, str):
        value = renamed.values.get(value, value)
    elif isinstance(value, int) and renamed.least is not None:
        value = max(value, renamed.least)
    return str(key), value


def current_config(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a config.json with current key names; other values are kept unchanged.

    Keys that did not exist when the file was written have the values that the run was made with.
    """
    current: dict[str, Any] = {
        name: {} if isinstance(section, Mapping) else section for name, section in sections.items()
    }
    for name, section in sections.items():
        for key, value in section.items() if isinstance(section, Mapping) else ():
            new, new_value = current_key(f'{name}.{key}', value)
            place, _, new_key = new.partition('.')
            if isinstance(current.setdefault(place, {}), dict):
                current[place][new_key] = new_value
    for declared in declared_keys().values():
        if declared.value_before is not None and isinstance(current.get(declared.section), dict):
            current[declared.section].setdefault(declared.name, declared.value_before.value)
    return current


def _number_of_switch(value: Any) -> Any:
    """Returns 0 or 1, as a text for a text; other values unchanged."""
    if isinstance(value, str) and value.lower() in _WORDS:
        return str(int(_WORDS[value.lower()]))
    return int(value) if isinstance(value, bool) else value


@functools.cache
def _read(sections: tuple[tuple[str, type], ...]) -> Mapping[str, Key]:
    found = {str(key): key for section, cls in sections for key in _read_section(section, cls).values()}
    return types.MappingProxyType(found)


@functools.cache
def _read_section(section: str, cls: type) -> Mapping[str, Key]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return types.MappingProxyType(
        {field.name: _key(section, field, hints[field.name]) for field in dataclasses.fields(cls)}
    )


@functools.cache
def _former(sections: tuple[tuple[str, type], ...]) -> Mapping[str, tuple[Key, Renamed]]:
    return {former: (key, renamed) for key in _read(sections).values() for former, renamed in key.renamed.items()}


def _key(section: str, field: dataclasses.Field[Any], hint: Any) -> Key:
    parts = list(_parts(hint))
    choices = [choice for part in parts for choice in _choices(part)]
    kinds = {part for part in parts if isinstance(part, type)} or {type(choice) for choice in choices}
    assert len(kinds) == 1, f'{section}.{field.name}: {hint} has several types'
    return Key(
        section,
        field.name,
        kinds.pop(),
        field.default,
        tuple(choices),
        _first(parts, Range),
        _first(parts, PathOption),
        frozenset(part for part in parts if isinstance(part, Form)),
        {
            part.name if '.' in part.name else f'{section}.{part.name}': part
            for part in parts
            if isinstance(part, Renamed)
        },
        _first(parts, ValueBefore),
    )


def _parts(hint: Any) -> Iterator[Any]:
    """Yields the alternatives and the markers of an annotation."""
    if typing.get_origin(hint) is typing.Annotated:
        plain, *markers = typing.get_args(hint)
        yield from _parts(plain)
        yield from markers
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for alternative in typing.get_args(hint):
            yield from _parts(alternative)
    else:
        yield hint


def _choices(part: Any) -> tuple[Any, ...]:
    if isinstance(part, Choices):
        return part.values
    return typing.get_args(part) if typing.get_origin(part) is typing.Literal else ()


def _first(parts: list[Any], marker: type[_Marker]) -> _Marker | None:
    return next((part for part in parts if isinstance(part, marker)), None)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
