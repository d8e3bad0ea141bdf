"""Measures a page in a headless Chromium: drawn figures, requested hosts and overflowing elements.

Only the command line of the browser is used. A script is added to a copy of the page, and its result is read from
the DOM that the browser prints.
"""

import base64
import hashlib
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
addEventListener('load', () => setTimeout(async () => {
  // Axes and labels are gray, and curves are not.
  const colored = (canvas) => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let at = 0; at < data.length; at += 4) {
      const [red, green, blue, alpha] = data.subarray(at, at + 4);
      count += alpha > 50 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
    }
    return count;
  };
  const charts = [...document.querySelectorAll('figure')].map((figure) => {
    const drawing = figure.querySelector('canvas, svg.bar'), box = drawing.getBoundingClientRect();
    return {
      title: figure.querySelector('figcaption').firstChild.textContent.trim(),
      width: box.width, height: box.height,
      drawn: drawing.matches('canvas') ? colored(drawing) : drawing.querySelectorAll('rect').length,
    };
  });
  const right = [...document.querySelectorAll('.plot, .tile, h1, h2, .legend li, .controls > *')]
    .map((element) => element.getBoundingClientRect().right);
  const figure = document.querySelector('.chart'), steps = [];
  /* ACTIONS */
  const output = document.createElement('pre');
  const result = {
    charts, faults,
    viewport: innerWidth, page: document.documentElement.scrollWidth, right: Math.max(0, ...right),
    background: getComputedStyle(document.documentElement).backgroundColor,
    steps, requests: performance.getEntriesByType('resource').map((entry) => entry.name),
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


def measure(page, folder, *, width, fragment='', actions=''):
    """Returns the measurements of a page in a browser window of `width` pixels.

    `actions` is JavaScript that runs before the end of the measurement. It can append to `steps`, and `figure` is the
    first chart. Besides the script's result, the measurements contain `console`, the messages of the console, and
    `hosts`, the requested URLs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / 'page.html', folder / 'net.json'
    measuring = MEASURE.replace('/* ACTIONS */', actions)
    # The policy allows scripts by their hashes.
    allowed = ' '.join(f"'{script_hash(script)}'" for script in (LISTEN, measuring))
    page = page.replace('script-src &#39;', f'script-src {allowed} &#39;'.replace("'", '&#39;'))
    file.write_text(page.replace('<head>', f'<head>{LISTEN}', 1).replace('</body>', f'{measuring}</body>', 1))
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


def script_hash(element):
    """Returns the source of a script element in a policy."""
    source = element.removeprefix('<script>').removesuffix('</script>')
    return f'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'


def incomplete_figures(result):
    """Returns the titles of figures that are too small or lack a curve."""
    return [
        chart['title']
        for chart in result['charts']
        if not (chart['width'] > 100 and chart['height'] > 10 and chart['drawn'] > 0)
    ]


def page_of(body, policy=''):
    """Returns a page for negative controls."""
    return f'<!doctype html><html><head>{policy}</head><body>{body}</body></html>'
