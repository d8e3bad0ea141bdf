"""Generated pages of the documentation, and the hooks of its site."""

import argparse
import dataclasses
import re

import pytest

import maxlm
from maxlm.cli.commands import COMMANDS, module_of
from maxlm.config.schema import SECTIONS
from tests.conftest import ROOT
from tools.docs.__main__ import DOCS, PAGES
from tools.docs.config_page import field_comments
from tools.docs.diagram import packages
from tools.docs.hooks import network_files, plain_bars, site_links
from tools.docs.structure_page import START, sections


@pytest.mark.parametrize('name', PAGES)
def test_committed_pages_are_current(name, monkeypatch):
    # tests/conftest.py replaces the directory, which the help of `maxlm plan` names.
    monkeypatch.setattr('maxlm.cli.setup.plan.CACHE', '~/.cache/maxlm/gpu-compiler')
    assert (DOCS / name).read_text() == PAGES[name](), 'write it with: python -m tools.docs'


def test_every_config_key_has_an_entry():
    page = (DOCS / 'reference/config.md').read_text()
    keys = [f'{section}.{field.name}' for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)]
    assert re.findall(r'^### `([\w.]+)`', page, re.MULTILINE) == keys


@dataclasses.dataclass
class _Section:
    # First line
    # and second.
    first: int = 1
    second: int = 2

    # Third.
    third: int = 3


def test_fields_share_the_comment_above():
    shared = 'First line and second.'
    assert field_comments(_Section) == {'first': shared, 'second': shared, 'third': 'Third.'}


def test_every_option_of_every_command_has_a_row():
    page = (DOCS / 'reference/cli.md').read_text()
    for verb in COMMANDS:
        section = page.split(f'## maxlm {verb}\n')[1].split('\n## ')[0]
        parsers = [module_of(verb).make_parser()]
        for parser in parsers:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
                elif action.help != argparse.SUPPRESS:
                    options = [option for option in action.option_strings if option not in ('-h', '--help')]
                    assert all(option in section for option in options), (verb, options)


def test_the_reference_of_the_api_contains_every_name():
    page = (DOCS / 'reference/api.md').read_text()
    assert set(re.findall(r'^## `maxlm\.(\w+)`', page, re.MULTILINE)) == set(maxlm.__all__)
    assert '::: maxlm.api.model.Model\n' in page


def test_the_diagram_contains_every_package_and_command():
    drawn = re.findall(r'>([\w.]+)</text>', (DOCS / 'figures/architecture.svg').read_text())
    modules = {path.stem for path in (ROOT / 'maxlm').iterdir() if path.is_dir() or path.suffix == '.py'}
    modules -= {'__pycache__'}
    assert modules - {'__init__', '__main__'} <= {*drawn}
    assert {*packages()} <= modules


def test_the_structure_lists_every_module_and_package(tmp_path):
    page = (DOCS / 'structure.md').read_text()
    listed = re.split(r'(?m)^### ', page.split(START)[1])[1:]
    files = {f'{part.splitlines()[0]}/{name}' for part in listed for name in re.findall(r'(?m)^\| `(\w+\.py)`', part)}
    modules = [path for path in (ROOT / 'maxlm').rglob('*.py') if path.name != '__init__.py']
    assert {path.relative_to(ROOT).as_posix() for path in modules} <= files
    assert '| `demo.sh` | Trains a first model: creates' in page
    # A row has the first line of the docstring, and its bars do not end the cell.
    folder = tmp_path / 'tools' / 'parts'
    folder.mkdir(parents=True)
    (folder / '__init__.py').write_text('"""Parts."""\n')
    (folder / 'a.py').write_text('"""Prints `a|b`.\n\nMore.\n"""\n')
    assert list(sections(tmp_path)) == [
        '### tools/parts\n\nParts.\n\n| file | contents |\n|---|---|\n| `a.py` | Prints `a\\|b`. |\n'
    ]


def test_links_that_leave_the_site_are_adapted():
    text = '[a](../CONTRIBUTING.md#style) [b](../maxlm/train.py) [c](data.md#x) [d](#y) [e](https://x.org/z)'
    adapted = '[a](contributing.md#style) b [c](data.md#x) [d](#y) [e](https://x.org/z)'
    assert site_links(text, 'docs') == adapted
    assert '[b](https://x.org/maxlm/blob/main/maxlm/train.py)' in site_links(text, 'docs', 'https://x.org/maxlm/')
    assert site_links('[a](docs/data.md#x)', '') == '[a](data.md#x)'
    assert (
        site_links('[a](../../CONTRIBUTING.md) [b](../plan.md)', 'docs/tutorials')
        == '[a](../contributing.md) [b](../plan.md)'
    )


def test_bars_in_the_code_of_tables():
    assert plain_bars(r'| `a\|b` | c\|d |') == r'| `a|b` | c\|d |'


def test_files_from_the_network_are_found():
    page = '<script src="https://cdn.org/a.js"></script><link rel="stylesheet" href="//cdn.org/b.css"><a href="https://c.org">'
    assert network_files(page) == ['https://cdn.org/a.js', '//cdn.org/b.css']
    assert network_files('<script src="../a.js"></script><img src="b.png">') == []


def test_lint_builds_the_site_strictly():
    # With --quiet, MkDocs does not count warnings, and --strict has no effect.
    lint = (ROOT / 'launch/test.sh').read_text().split('lint() {')[1].split('\n}')[0]
    (command,) = (line for line in lint.splitlines() if 'mkdocs' in line and not line.lstrip().startswith('#'))
    assert command.split()[-3:] == ['mkdocs', 'build', '--strict']
