"""Reference page of the config keys, from the fields of the schema and their comments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterable

from maxlm.config.keys import Key, section_keys
from maxlm.config.schema import SECTIONS
from maxlm.config.sections.declaration import Form
from maxlm.storage.paths import ANY
from tools.docs.markdown import escaped

INTRODUCTION = """# Config keys

All config keys with their types, defaults and values. Set a key on the command line with
`--config.section.key=value`, or in a config file. Example:

```
maxlm train --config=tiny --config.data.path=data/mine --config.train.num_tokens=4e5
```
"""


def field_comments(section: type) -> dict[str, str]:
    """Returns the comment of each field of a dataclass. A field without a comment shares that of the field above."""
    classes = [cls for cls in reversed(section.__mro__) if dataclasses.is_dataclass(cls)]
    return {name: comment for cls in classes for name, comment in _own_comments(cls).items()}


def _own_comments(section: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(section))
    lines = source.splitlines()
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    comments: dict[str, str] = {}
    comment = ''
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        first = node.lineno - 1
        while lines[first - 1].lstrip().startswith('#'):
            first -= 1
        above = [line.strip().removeprefix('#').strip() for line in lines[first : node.lineno - 1]]
        comment = ' '.join(above) or comment
        assert isinstance(node.target, ast.Name)
        comments[node.target.id] = comment
    return comments


def _listed(names: Iterable[str]) -> str:
    return ', '.join(f'`{name}`' for name in names)


def facts(key: Key) -> str:
    """Returns type, default, allowed values and former names of a key in one line."""
    default = 'set by `model.family`' if key.default is None else f'`{key.default!r}`'
    if key.range is not None and key.default is not None and key.default not in key.range:
        default = 'none, the key must be set'
    parts = [f'Type: {key.kind.__name__}', f'default: {default}']
    if key.choices:
        function = ', or a function of yours as `package.module:name`' if Form.FUNCTION in key.forms else ''
        parts.append(f'one of {_listed(map(repr, key.choices))}{function}')
    if key.range is not None:
        parts.append(f'{key.range}{", or auto" if Form.OR_AUTO in key.forms else ""}')
    if key.path is not None:
        protocols = '' if key.path.urls == ANY else f'{" or ".join(f"{name}://" for name in key.path.urls)} '
        parts.append(f'path or {protocols}URL' if key.path.urls else 'local path')
    if key.renamed:
        parts.append(f'formerly {_listed(key.renamed)}')
    return f'*{"; ".join(parts)}.*'


def config_page() -> str:
    """Returns docs/reference/config.md."""
    lines = [INTRODUCTION]
    for section, cls in SECTIONS.items():
        comments = field_comments(cls)
        lines.append(f'## {section}\n')
        for name, key in section_keys(section).items():
            lines.append(f'### `{key}` {{ #{key} }}\n')
            lines.append(f'{escaped(comments[name])}\n\n{facts(key)}\n')
    return '\n'.join(lines)
