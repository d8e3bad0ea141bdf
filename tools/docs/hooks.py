"""Hooks of MkDocs: adds the pages at the top level of the repository, and adapts links that leave docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# Page of the site → file at the top level.
TOP_LEVEL = {'contributing.md': 'CONTRIBUTING.md', 'changelog.md': 'CHANGELOG.md', 'security.md': 'SECURITY.md'}
LINK = re.compile(r'\[([^]]+)\]\(([^)\s]+)\)')


def site_links(text: str, directory: str, repository: str = '') -> str:
    """Returns Markdown whose links to files outside of docs/ work on the site.

    Links to top-level pages lead to their copy on the site. Links to other files lead to the repository; without one,
    only their text remains.

    Args:
        text: Markdown with links relative to `directory`.
        directory: directory of the text in the repository.
        repository: URL of the files in the repository; '' = none.
    """

    def replace(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if '://' in target or target.startswith(('#', 'mailto:')):
            return match[0]
        path, _, anchor = target.partition('#')
        file = posixpath.normpath(posixpath.join(directory, path))
        page = {name: page for page, name in TOP_LEVEL.items()}.get(file, file.removeprefix('docs/'))
        if file.startswith('docs/') or page != file:
            # The directory of a top-level page on the site is docs/.
            base = directory.removeprefix('docs').strip('/')
            return f'[{label}]({posixpath.relpath(page, base or ".")}{f"#{anchor}" if anchor else ""})'
        return f'[{label}]({repository.rstrip("/")}/blob/main/{file})' if repository else label

    return LINK.sub(replace, text)


def on_files(files: Files, config: Any) -> Files:
    """Adds the top-level pages."""
    for page, name in TOP_LEVEL.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Adapts the links of a page."""
    source = page.file.src_uri
    directory = '' if source in TOP_LEVEL else posixpath.join('docs', posixpath.dirname(source)).rstrip('/')
    return site_links(markdown, directory, config.repo_url or '')
