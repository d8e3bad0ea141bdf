"""Tests the report file, which is valid, safe and small, and is written for any content of the workdir."""

import dataclasses
import html.parser
import json
import logging
import re
import subprocess
import sys

import pytest

from maxlm.reporting.page import NAME, is_foreign, page, policy, write_at_end, write_page
from maxlm.reporting.run_summary import make_runs
from maxlm.telemetry.run_history import read_history
from tests import workdirs
from tests.conftest import ROOT

VOID = {'meta', 'br', 'input'}
# Start of a page of version 0.1.
OLD_PAGE = (
    '<!doctype html>\n<html lang="en">\n<head><meta http-equiv="Content-Security-Policy" content="'
    'default-src &#x27;none&#x27;; style-src &#x27;unsafe-inline&#x27;; script-src &#x27;unsafe-inline&#x27;; '
    'img-src data:">'
)


class Parser(html.parser.HTMLParser):
    """Fails on tags that are not closed in order; collects ids, links, scripts and addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.tags, self.addresses = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == 'id':
                self.ids.append(value)
            elif name == 'href':
                self.links.append(value)
            elif name in ('src', 'srcset', 'action', 'xlink:href'):
                self.addresses.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text):
    parser = Parser()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize('name', workdirs.BUILDERS)
def test_every_state(run_of, name):
    text = page(run_of(name))
    found = parsed(text)
    assert [link.removeprefix('#') for link in found.links if link.removeprefix('#') not in found.ids] == []
    assert len(found.ids) == len(set(found.ids))
    assert found.addresses == []
    # One script, and one block of data for each chart.
    assert found.tags.count('script') == 1 + text.count('<figure class="chart')
    assert f'content="{policy().replace(chr(39), "&#39;")}"' in text
    assert ('<figure' in text) == (name != 'empty')


def test_all_states_on_one_page(run_of):
    names = tuple(workdirs.BUILDERS)
    found = parsed(page(run_of(*names)))
    assert len(found.ids) == len(set(found.ids))


@pytest.mark.parametrize('names', [('finished',), ('finished', 'crashed')])
def test_charts_and_controls_have_names_and_tables(run_of, names):
    text = page(run_of(*names))
    charts = re.findall(r'<figure class="chart.*?</figure>', text, re.DOTALL)
    assert len(charts) > 10
    for chart in charts:
        title = re.search(r'<figcaption>(.*?) <span', chart)[1]
        assert f'aria-roledescription="chart" aria-label="{title} over ' in chart
        assert re.search(rf'<details>.*aria-label="{re.escape(title)}".*<td>[\d.,]+</td>.*</details>', chart, re.DOTALL)
        assert '<button type="button" aria-pressed="true"' in chart
    labels = ''.join(re.findall(r'<label>.*?</label>', text, re.DOTALL))
    assert labels.count('<input') == text.count('<input') == (2 if len(names) == 1 else 4)
    # The bars of the time have a description.
    assert re.search(r'role="img" aria-label="\w+: productive steps \d+%', text)


def test_texts_of_a_run_are_escaped(tmp_path):
    evil = '</style></script><script>alert(1)</script><img src=x onerror=alert(1)>'
    workdir = workdirs.finished(tmp_path / 'run')
    for path in workdir.glob('*.jsonl'):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text(''.join(json.dumps(poisoned(line, evil)) + '\n' for line in lines))
    history = read_history(workdir)
    config = dataclasses.replace(history.config, data=dataclasses.replace(history.config.data, path=evil))
    histories = [dataclasses.replace(history, workdir=f'/{name}{evil}', config=config) for name in 'ab']
    text = page(make_runs(histories, workdirs.NOW))
    found = parsed(text)
    assert found.tags.count('script') == 1 + text.count('<figure class="chart')
    assert 'img' not in found.tags
    assert found.tags.count('style') == 1


def poisoned(value, evil):
    """Replaces every string except the kinds of lines, and adds a metric whose name contains `evil`."""
    if isinstance(value, dict):
        kept = {key: item if key in ('kind', 'why') else poisoned(item, evil) for key, item in value.items()}
        return {**kept, f'train/loss/{evil}': 1.0} if 'train/loss' in value else kept
    if isinstance(value, list):
        return [poisoned(item, evil) for item in value]
    return evil if isinstance(value, str) else value


@pytest.mark.parametrize(
    'junk', ['{}\n', '[]\n', 'x\n', '{"time": "x", "step": [], "kind": {}, "life": null}\n', '\x00\n']
)
def test_files_with_invalid_lines(tmp_path, junk):
    workdir = workdirs.finished(tmp_path)
    for path in workdir.glob('*.jsonl'):
        path.write_text(junk * 3)
    parsed(page(make_runs([read_history(workdir)], workdirs.NOW)))


def test_page_of_a_long_run_is_below_two_megabytes(run_of):
    (run,) = run_of('finished')
    base = run.history.metrics[5]
    sources = {f'{kind}/loss/source {n}': 2.0 for kind in ('train', 'eval') for n in range(12)}
    lines = [
        {**base, 'step': step, 'train/loss': step % 97 / 10 + 1e-6, 'perf/mfu': step % 89 / 100, **sources}
        for step in range(1, 10_001)
    ]
    samples = [{'step': step, 'prompt': f'prompt {n}', 'text': 'é' * 9000} for step in range(99) for n in range(9)]
    history = dataclasses.replace(run.history, metrics=lines, samples=samples)
    assert 500_000 < len(page(make_runs([history], workdirs.NOW)).encode()) < 2_000_000


def test_policy_allows_only_our_script_and_style():
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[\w+/=]+'; script-src 'sha256-[\w+/=]+'", policy())


def test_unprintable_characters_are_replaced(run_of):
    (run,) = run_of('finished')
    samples = [{'step': 1, 'prompt': 'p', 'text': 'a\x00b\x1b[31mc\ud800d\n\te'}]
    text = page(make_runs([dataclasses.replace(run.history, samples=samples)], workdirs.NOW))
    assert 'a\ufffdb\ufffd[31mc\ufffdd\n\te' in text
    text.encode()


def test_pages_of_older_versions_are_ours(tmp_path):
    path = tmp_path / 'report.html'
    for content, foreign in ((OLD_PAGE, False), (OLD_PAGE.replace('default-src', 'img-src'), True)):
        path.write_text(content)
        assert is_foreign(path) == foreign


def test_page_is_written_atomically(tmp_path):
    workdir = workdirs.finished(tmp_path / 'run')
    (workdir / NAME).write_text('old')
    write_at_end(workdir)
    text = (workdir / NAME).read_text()
    assert text.startswith('<!doctype html>')
    assert text.endswith('</html>\n')
    assert not list(workdir.glob('.*.partial'))
    # An existing page does not affect the next one, which differs only in its time.
    write_page(tmp_path / 'again.html', [read_history(workdir)])
    assert len((tmp_path / 'again.html').read_text()) == len(text)


def test_error_at_the_end_of_a_run_is_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger('maxlm'), 'propagate', True)
    write_at_end(tmp_path / 'none')
    workdir = workdirs.finished(tmp_path / 'run')
    (workdir / NAME).mkdir()
    write_at_end(workdir)
    # If propagation is off at the start of the test, the logger also has the handler, so use a set.
    warnings = {(record.levelname, record.getMessage().partition(str(tmp_path))[0]) for record in caplog.records}
    assert warnings == {
        ('WARNING', 'report.html could not be written: InputError: '),
        ('WARNING', "report.html could not be written: IsADirectoryError: [Errno 21] Is a directory: '"),
    }
    assert not list(workdir.glob('.*.partial'))


@pytest.mark.multiprocess
def test_report_does_not_import_jax():
    program = (
        'import sys, maxlm.cli.runs.report\n'
        'print([name for name in ("jax", "tensorflow", "matplotlib") if name in sys.modules])'
    )
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == '[]\n'
