"""Hooks of MkDocs: add the pages at the top level of the repository, adapt links, and remove scripts of a CDN."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# Page of the site → file at the top level.
TOP_LEVEL = {'contributing.md': 'CONTRIBUTING.md', 'changelog.md': 'CHANGELOG.md', 'security.md': 'SECURITY.md'}
# Script of the theme for the search in pages that are opened as files, and its replacement in docs/.
CDN_SCRIPT, LOCAL_SCRIPT = 'https://unpkg.com/iframe-worker/shim', 'assets/iframe_worker.js'
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


def plain_bars(text: str) -> str:
    """Returns Markdown without backslashes before bars in code. GitHub needs them in tables, but MkDocs shows them."""
    return re.sub(r'`[^`\n]*`', lambda code: code[0].replace(r'\|', '|'), text)


def network_files(html: str) -> list[str]:
    """Returns the URLs of scripts, styles and images that a page loads from the network."""
    return re.findall(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="?((?:https?:)?//[^">\s]+)', html)


def on_files(files: Files, config: Any) -> Files:
    """Adds the top-level pages."""
    for page, name in TOP_LEVEL.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Adapts the links of a page, and the bars of code in its tables."""
    source = page.file.src_uri
    directory = '' if source in TOP_LEVEL else posixpath.join('docs', posixpath.dirname(source)).rstrip('/')
    return site_links(plain_bars(markdown), directory, config.repo_url or '')


def on_post_build(config: Any) -> None:
    """Makes every page load the script of the search from the site.

    Raises:
        PluginError: a page loads a file from the network.
    """
    site = Path(config.site_dir)
    for path in site.rglob('*.html'):
        local = posixpath.relpath(LOCAL_SCRIPT, path.relative_to(site).parent.as_posix())
        html = path.read_text(encoding='utf-8').replace(CDN_SCRIPT, local)
        if found := network_files(html):
            raise PluginError(f'{path.name} loads {found[0]} from the network; add a copy to docs/assets')
        path.write_text(html, encoding='utf-8')
