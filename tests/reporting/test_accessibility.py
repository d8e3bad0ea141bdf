"""Tests the report with axe-core in a real browser: names, roles, contrast, order of headings, keyboard access."""

import importlib.util
import json
import time
from pathlib import Path

import pytest

from maxlm.reporting.page import page
from tests.reporting.browser import page_of
from tests.serving.devtools import Tab

pytestmark = pytest.mark.browser


@pytest.fixture(scope='module')
def violations(tmp_path_factory):
    """Returns a function that returns the rules that a page violates."""
    # The package is not imported, because only its copy of axe-core is needed.
    package = importlib.util.find_spec('axe_playwright_python').submodule_search_locations[0]
    axe = (Path(package) / 'axe.min.js').read_text()
    folder = tmp_path_factory.mktemp('pages')
    with Tab(folder / 'profile') as tab:

        def evaluate(expression):
            done = tab.send('Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True)
            return done['result'].get('value')

        def violations(text, width, fragment):
            file = folder / f'{len(list(folder.iterdir()))}.html'
            file.write_text(text)
            tab.send('Emulation.setDeviceMetricsOverride', width=width, height=900, deviceScaleFactor=1, mobile=False)
            tab.send('Page.navigate', url=f'{file.as_uri()}{fragment}')
            while evaluate('document.readyState + location.pathname') != f'complete{file}':
                time.sleep(0.02)
            evaluate('document.querySelectorAll("details").forEach((element) => { element.open = true; })')
            evaluate(axe)
            found = evaluate('axe.run().then((result) => JSON.stringify([result.passes, result.violations]))')
            passed, violated = json.loads(found)
            assert len(passed) > 3
            return {rule['id']: [node['html'] for node in rule['nodes']] for rule in violated}

        yield violations


@pytest.mark.parametrize(('width', 'fragment'), [(1280, '#light'), (360, '#dark')])
def test_the_report_violates_no_rule(violations, run_of, width, fragment):
    assert violations(page(run_of('finished', 'crashed')), width, fragment) == {}


def test_violations_are_found(violations):
    text = page_of('<main><h1>Run</h1><p style="color: #ccc">pale</p><img src="data:,"><input></main>')
    assert {'color-contrast', 'image-alt', 'label'} <= violations(text, 1280, '').keys()
