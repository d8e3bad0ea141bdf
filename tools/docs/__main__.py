"""Writes the generated pages and figures of the documentation.

    python -m tools.docs

tests/tools/test_docs.py compares the committed files with their generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from maxlm.telemetry.metrics import metrics_page
from tools.docs.api_page import api_page
from tools.docs.cli_page import cli_page
from tools.docs.config_page import config_page
from tools.docs.diagram import architecture

DOCS = Path(__file__).parents[2] / 'docs'
PAGES: Mapping[str, Callable[[], str]] = {
    'metrics.md': metrics_page,
    'reference/config.md': config_page,
    'reference/cli.md': cli_page,
    'reference/api.md': api_page,
    'figures/architecture.svg': architecture,
}

if __name__ == '__main__':
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding='utf-8')
