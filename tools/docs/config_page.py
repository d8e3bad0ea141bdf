"""Reference page of the config keys, from the fields of the schema and their comments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

from maxlm.config.ranges import RANGES
from maxlm.config.schema import SECTIONS
from maxlm.config.sections.model import FAMILY
from maxlm.config.validation import CHOICES
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


def facts(key: str, field: dataclasses.Field[Any]) -> str:
    """Returns type, default and allowed values of a key in one line."""
    default = 'set by `model.family`' if field.default is FAMILY and key != 'model.family' else f'`{field.default!r}`'
    # Annotations are strings, because the module imports `annotations`.
    parts = [f'Type: {field.type}', f'default: {default}']
    if key in CHOICES:
        parts.append(f'one of {", ".join(f"`{choice!r}`" for choice in CHOICES[key])}')
    elif key in RANGES:
        parts.append(str(RANGES[key]))
    return f'*{"; ".join(parts)}.*'


def config_page() -> str:
    """Returns docs/reference/config.md."""
    lines = [INTRODUCTION]
    for section, kind in SECTIONS.items():
        comments = field_comments(kind)
        lines.append(f'## {section}\n')
        for field in dataclasses.fields(kind):
            key = f'{section}.{field.name}'
            lines.append(f'### `{key}` {{ #{key} }}\n')
            lines.append(f'{escaped(comments[field.name])}\n\n{facts(key, field)}\n')
    return '\n'.join(lines)
