"""Tests the page in a real browser: figures are drawn, nothing is fetched or too wide, and the pointer reads values."""

import http.server
import threading

import pytest

from maxlm.reporting.drawing.palette import GROUND
from maxlm.reporting.page import POLICY, page
from maxlm.reporting.sections.run_summary import make_runs
from maxlm.telemetry.run_history import read_history
from tests import workdirs
from tests.reporting.browser import look_at, page_of, undrawn

pytestmark = pytest.mark.browser

NARROW, WIDE = 360, 1280
TITLES = (
    *('Training and validation loss', 'Training loss by source', 'Validation loss by source'),
    *('Learning rate', 'Gradient norm', 'Throughput', 'MFU', 'Memory of a device', 'Wait for data'),
    *('Device use', 'Device memory', 'Temperature', 'Power', 'Clock', 'CPU of the host', 'Memory of the host'),
)


@pytest.fixture(scope='module')
def make_page(tmp_path_factory):
    def make(*names):
        folder = tmp_path_factory.mktemp('workdirs')
        histories = [read_history(workdirs.BUILDERS[name](folder / name)) for name in names]
        return page(make_runs(histories, workdirs.NOW))

    return make


def check(told, width):
    assert told['viewport'] == width
    assert told['page'] <= width
    assert told['right'] <= width
    assert undrawn(told) == []
    assert (told['faults'], told['console'], told['requests'], told['hosts']) == ([], [], [], [])


def color(hexadecimal):
    return f'rgb({", ".join(str(int(hexadecimal[at : at + 2], 16)) for at in (1, 3, 5))})'


@pytest.mark.parametrize(
    ('width', 'fragment', 'ground'), [(NARROW, '#dark', GROUND.dark), (WIDE, '#light', GROUND.light)]
)
def test_a_run(make_page, tmp_path, width, fragment, ground):
    told = look_at(make_page('finished'), tmp_path, width=width, fragment=fragment)
    check(told, width)
    titles = [chart['title'] for chart in told['charts']]
    assert [title for title in TITLES if title not in titles] == []
    assert told['ground'] == color(ground)
    # Step 200 is at the middle of the axis. When the pointer leaves, the last value is shown again.
    where, value, after, last = told['read']
    assert where.startswith('step 200')
    assert value == f'{workdirs.train_loss(200):.4g}'
    assert (after, last) == ('', f'{workdirs.train_loss(400):.4g}')


def test_several_runs_on_a_phone(make_page, tmp_path):
    check(look_at(make_page('finished', 'two_hosts', 'diverged'), tmp_path, width=NARROW), NARROW)


@pytest.fixture
def elsewhere():
    """Starts a server that records requests."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}', asked
    server.shutdown()
    server.server_close()


def test_measurement_detects_problems(elsewhere, tmp_path):
    url, asked = elsewhere
    chart = '<figure><figcaption>Flat</figcaption><svg class="plot" width="200" height="50">{}</svg></figure>'
    body = f'<img src="{url}/x.png"><div style="width:500px">wide</div>{chart.format("<path data-series=0 d=MNaN>")}'
    body += '<script>console.error("told"); missing();</script>'
    told = look_at(page_of(body), tmp_path / 'open', width=NARROW)
    assert told['page'] > NARROW
    assert undrawn(told) == ['Flat']
    assert told['requests'] == [f'{url}/x.png']
    assert any(host.startswith(url) for host in told['hosts'])
    assert asked == ['/x.png']
    assert any('told' in line for line in told['console'])
    assert any('missing' in fault for fault in told['faults'])


def test_policy_blocks_all_requests(elsewhere, tmp_path):
    url, asked = elsewhere
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    body = f'<img src="{url}/x.png"><script>fetch("{url}/y").catch(() => 0);</script>'
    told = look_at(page_of(body, policy), tmp_path, width=NARROW)
    assert asked == []
    assert {fault for fault in told['faults'] if fault.startswith('policy')} == {
        'policy: img-src',
        'policy: connect-src',
    }
