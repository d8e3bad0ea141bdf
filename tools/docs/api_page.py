"""Reference page of the Python API, from the names that `maxlm` exports."""

from __future__ import annotations

import maxlm

INTRODUCTION = """# Python API reference

Signatures and docstrings of the names that `import maxlm` provides. [Python API](../python.md) has examples.
"""


def api_page() -> str:
    """Returns docs/reference/api.md, with directives of mkdocstrings."""
    lines = [INTRODUCTION]
    documented: dict[str, str] = {}
    for name in sorted(maxlm.__all__, key=lambda name: (not name[:1].isupper(), name)):
        value = getattr(maxlm, name)
        lines.append(f'## `maxlm.{name}` {{ #{name.strip("_")} }}\n')
        if isinstance(value, str):
            lines.append('Version of the package, a string.\n')
            continue
        path = f'{value.__module__}.{value.__qualname__}'
        if path in documented:
            lines.append(f'Same as [`maxlm.{documented[path]}`](#{documented[path]}).\n')
            continue
        documented[path] = name
        lines.append(f'::: {path}\n')
    return '\n'.join(lines)
