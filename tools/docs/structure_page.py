"""The list of files in docs/structure.md, with the first line of each docstring or the first sentence of a script.

The text before the list is written by hand.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from tools.docs.markdown import escaped

ROOT = Path(__file__).parents[2]
PAGE = ROOT / 'docs/structure.md'
# The list follows this line and ends the page.
START = '## List of files\n'
INTRODUCTION = """
`python -m tools.docs` writes this list from docstrings and comments. Packages are in alphabetical order;
[CONTRIBUTING](../CONTRIBUTING.md#package-structure) has their layers.
"""
# Directories, and the names of their files in the list.
DIRECTORIES = {
    'configs': ('*.py',),
    'maxlm': ('*.py',),
    'launch': ('*.sh', '*.sbatch', '*.yaml'),
    'examples': ('*.py',),
    'benchmarks': ('*.py',),
    'tools': ('*.py',),
}


def first_line(path: Path) -> str:
    """Returns the first line of a module's docstring, or the first sentence of a script's comments; '' = none."""
    if path.suffix != '.py':
        lines = [line for line in path.read_text(encoding='utf-8').splitlines() if not line.startswith('#!')]
        comment = ' '.join(line[2:] for line in itertools.takewhile(lambda line: line.startswith('# '), lines))
        return re.split(r'(?<=[.])\s', comment)[0]
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    return docstring.partition('\n')[0]


def sections(root: Path) -> Iterator[str]:
    """Yields the heading, the docstring and the files of each directory."""
    for name, patterns in DIRECTORIES.items():
        files = sorted(path for pattern in patterns for path in (root / name).rglob(pattern))
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
