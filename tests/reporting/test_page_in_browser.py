"""Tests the page in a real browser: figures are drawn, nothing is fetched or too wide, and the pointer reads values."""

import http.server
import threading

import pytest

from maxlm.reporting.drawing.palette import BACKGROUND
from maxlm.reporting.page import POLICY, page
from maxlm.reporting.sections.run_summary import make_runs
from maxlm.telemetry.run_history import read_history
from tests import workdirs
from tests.reporting.browser import incomplete_figures, measure, page_of

pytestmark = pytest.mark.browser

NARROW, WIDE = 360, 1280
TITLES = (
    *('Training and validation loss', 'Training loss by source', 'Validation loss by source'),
    *('Learning rate', 'Gradient norm', 'Throughput', 'MFU', 'Device memory', 'Data loading time'),
    *('Device utilization', 'Device memory', 'Temperature', 'Power', 'Clock', 'Host CPU', 'Host memory'),
)


@pytest.fixture(scope='module')
def make_page(tmp_path_factory):
    def make(*names):
        folder = tmp_path_factory.mktemp('workdirs')
        histories = [read_history(workdirs.BUILDERS[name](folder / name)) for name in names]
        return page(make_runs(histories, workdirs.NOW))

    return make


def check(result, width):
    assert result['viewport'] == width
    assert result['page'] <= width
    assert result['right'] <= width
    assert incomplete_figures(result) == []
    assert (result['faults'], result['console'], result['requests'], result['hosts']) == ([], [], [], [])


def color(hexadecimal):
    return f'rgb({", ".join(str(int(hexadecimal[at : at + 2], 16)) for at in (1, 3, 5))})'


@pytest.mark.parametrize(
    ('width', 'fragment', 'background'), [(NARROW, '#dark', BACKGROUND.dark), (WIDE, '#light', BACKGROUND.light)]
)
def test_a_run(make_page, tmp_path, width, fragment, background):
    result = measure(make_page('finished'), tmp_path, width=width, fragment=fragment)
    check(result, width)
    titles = [chart['title'] for chart in result['charts']]
    assert [title for title in TITLES if title not in titles] == []
    assert result['background'] == color(background)
    # Step 200 is at the middle of the axis. When the pointer leaves, the last value is shown again.
    where, value, after, last = result['read']
    assert where.startswith('step 200')
    assert value == f'{workdirs.train_loss(200):.4g}'
    assert (after, last) == ('', f'{workdirs.train_loss(400):.4g}')


def test_several_runs_on_a_phone(make_page, tmp_path):
    check(measure(make_page('finished', 'two_hosts', 'diverged'), tmp_path, width=NARROW), NARROW)


@pytest.fixture
def request_server():
    """Starts a server that records requests."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}', requests
    server.shutdown()
    server.server_close()


def test_measurement_detects_problems(request_server, tmp_path):
    url, requests = request_server
    chart = '<figure><figcaption>Flat</figcaption><svg class="plot" width="200" height="50">{}</svg></figure>'
    body = f'<img src="{url}/x.png"><div style="width:500px">wide</div>{chart.format("<path data-series=0 d=MNaN>")}'
    body += '<script>console.error("message"); missing();</script>'
    result = measure(page_of(body), tmp_path / 'open', width=NARROW)
    assert result['page'] > NARROW
    assert incomplete_figures(result) == ['Flat']
    assert result['requests'] == [f'{url}/x.png']
    assert any(host.startswith(url) for host in result['hosts'])
    assert requests == ['/x.png']
    assert any('message' in line for line in result['console'])
    assert any('missing' in fault for fault in result['faults'])


def test_policy_blocks_all_requests(request_server, tmp_path):
    url, requests = request_server
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    body = f'<img src="{url}/x.png"><script>fetch("{url}/y").catch(() => 0);</script>'
    result = measure(page_of(body, policy), tmp_path, width=NARROW)
    assert requests == []
    assert {fault for fault in result['faults'] if fault.startswith('policy')} == {
        'policy: img-src',
        'policy: connect-src',
    }
