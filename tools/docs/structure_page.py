"""The list of files in docs/structure.md, with the first line of each docstring.

The text before the list is written by hand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.docs.markdown import escaped

ROOT = Path(__file__).parents[2]
PAGE = ROOT / 'docs/structure.md'
# The list follows this line and ends the page.
START = '## List of files\n'
INTRODUCTION = """
`python -m tools.docs` writes this list from the docstrings. Packages are in alphabetical order;
[CONTRIBUTING](../CONTRIBUTING.md#package-structure) has their layers.
"""
DIRECTORIES = ('configs', 'maxlm', 'examples', 'benchmarks', 'tools')


def first_line(path: Path) -> str:
    """Returns the first line of a module's docstring; '' if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    return docstring.partition('\n')[0]


def sections(root: Path) -> Iterator[str]:
    """Yields the heading, the docstring and the files of each directory that contains modules."""
    for name in DIRECTORIES:
        files = sorted((root / name).rglob('*.py'))
        for folder in sorted({path.parent for path in files}):
            lines = [f'### {folder.relative_to(root).as_posix()}\n']
            modules = [path for path in files if path.parent == folder and path.name != '__init__.py']
            if (folder / '__init__.py').is_file() and (description := first_line(folder / '__init__.py')):
                lines.append(f'{escaped(description)}\n')
            if modules:
                lines += ['| file | contents |', '|---|---|']
                for path in modules:
                    contents = escaped(first_line(path)).replace('|', r'\|')
                    lines.append(f'| `{path.name}` | {contents} |')
                lines.append('')
            yield '\n'.join(lines)


def structure_page() -> str:
    """Returns docs/structure.md with the current list of files.

    Raises:
        ValueError: the page does not contain START once.
    """
    before, _ = PAGE.read_text(encoding='utf-8').split(START)
    return '\n'.join([f'{before}{START}{INTRODUCTION}', *sections(ROOT)])
