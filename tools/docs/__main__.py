"""Writes the generated pages and figures of the documentation.

    python -m tools.docs

tests/tools/test_docs.py compares the committed files with their generators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, exit_code
from maxlm.telemetry.metrics import metrics_page
from tools.docs.api_page import api_page
from tools.docs.cli_page import cli_page
from tools.docs.config_page import config_page
from tools.docs.diagram import architecture
from tools.docs.structure_page import structure_page

DOCS = Path(__file__).parents[2] / 'docs'
PAGES: Mapping[str, Callable[[], str]] = {
    'metrics.md': metrics_page,
    'reference/config.md': config_page,
    'reference/cli.md': cli_page,
    'reference/api.md': api_page,
    'figures/architecture.svg': architecture,
    'structure.md': structure_page,
}


def main(argv: list[str]) -> int:
    """Writes all files and returns the exit code."""
    ArgumentParser(prog='python -m tools.docs', description=__doc__).parse_args(argv)
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding='utf-8')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
