"""Measures a page in a headless Chromium: drawn figures, requested hosts and overflowing elements.

Only the command line of the browser is used. A script is added to a copy of the page, and its result is read from
the DOM that the browser prints.
"""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

CANDIDATES = ('chromium-headless-shell', 'chromium', 'chromium-browser', 'google-chrome')
# The script precedes the rest of the page, so that it misses no event.
LISTEN = """<script>
window.faults = [];
addEventListener('error', (event) => faults.push(String(event.message || event.target.outerHTML)), true);
addEventListener('securitypolicyviolation', (event) => faults.push(`policy: ${event.violatedDirective}`));
</script>"""
MEASURE = """<script>
// Wait, so that later violations of the policy are recorded too.
addEventListener('load', () => setTimeout(() => {
  const length = (path) => path.getTotalLength();
  const charts = [...document.querySelectorAll('figure')].map((figure) => {
    const box = figure.querySelector('svg.plot, svg.bar').getBoundingClientRect();
    const curves = [...figure.querySelectorAll('path[data-series], .bar path')];
    return {
      title: figure.querySelector('figcaption').firstChild.textContent.trim(),
      width: box.width, height: box.height,
      lengths: curves.map(length), shapes: curves.map((path) => path.getBoundingClientRect().width),
      hover: figure.querySelector('.hover')?.textContent, labels: figure.querySelectorAll('.x span').length,
    };
  });
  const read = (share) => {
    const plot = document.querySelector('.plot');
    if (!plot?.dataset.x) return null;
    const box = plot.getBoundingClientRect();
    const where = { clientX: box.left + share * box.width, clientY: box.top + 5, bubbles: true };
    plot.dispatchEvent(new PointerEvent('pointermove', where));
    const figure = plot.closest('figure');
    const seen = [figure.querySelector('.hover').textContent, figure.querySelector('.legend b').textContent];
    plot.dispatchEvent(new PointerEvent('pointerleave'));
    return [...seen, figure.querySelector('.hover').textContent, figure.querySelector('.legend b').textContent];
  };
  const right = [...document.querySelectorAll('.frame span, .tile, h1, h2, .legend li')]
    .map((element) => element.getBoundingClientRect().right);
  const output = document.createElement('pre');
  const result = {
    charts, faults, read: read(0.5),
    viewport: innerWidth, page: document.documentElement.scrollWidth, right: Math.max(0, ...right),
    background: getComputedStyle(document.documentElement).backgroundColor,
    requests: performance.getEntriesByType('resource').map((entry) => entry.name),
  };
  output.id = 'measured';
  output.textContent = JSON.stringify(result);
  document.body.replaceChildren(output);
}, 100));
</script>"""


def find_browser():
    """Returns the path of the browser in MAXLM_BROWSER, or of an installed browser."""
    for candidate in filter(None, (os.environ.get('MAXLM_BROWSER'), *CANDIDATES)):
        if path := shutil.which(candidate):
            return path
    pytest.fail('no Chromium: launch/test.sh installs it; or set MAXLM_BROWSER')


def measure(page, folder, *, width, fragment=''):
    """Returns the measurements of a page in a browser window of `width` pixels.

    Besides the script's result they contain `console`, the messages of the console, and `hosts`, the requested URLs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / 'page.html', folder / 'net.json'
    file.write_text(page.replace('<head>', f'<head>{LISTEN}', 1).replace('</body>', f'{MEASURE}</body>', 1))
    command = [
        find_browser(),
        *('--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--enable-logging=stderr'),
        *('--disable-background-networking', '--disable-component-update', '--no-first-run', '--dump-dom'),
        '--virtual-time-budget=2000',
        *(f'--user-data-dir={folder / "profile"}', f'--log-net-log={log}', f'--window-size={width},900'),
        f'{file.as_uri()}{fragment}',
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f'the page returned no measurements: {done.stderr[-2000:]}'
    result = json.loads(html.unescape(found[1]))
    result['console'] = [line for line in done.stderr.splitlines() if ':CONSOLE' in line]
    result['hosts'] = sorted(set(re.findall(r'"(https?://[^"]+)"', log.read_text())))
    return result


def incomplete_figures(result):
    """Returns the titles of figures that are too small or lack a curve."""
    return [
        chart['title']
        for chart in result['charts']
        if not (
            chart['width'] > 100
            and chart['height'] > 10
            and chart['lengths']
            and all(length > 0 for length in chart['lengths'])
            and all(width > 0 for width in chart['shapes'])
        )
    ]


def page_of(body, policy=''):
    """Returns a page for negative controls."""
    return f'<!doctype html><html><head>{policy}</head><body>{body}</body></html>'
