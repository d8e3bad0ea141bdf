"""Tests the page in a real browser: figures are drawn, nothing is fetched or too wide, and the pointer reads values."""

import dataclasses
import http.server
import threading

import pytest

from maxlm.reporting.page import page, policy
from maxlm.reporting.run_summary import make_runs
from maxlm.telemetry.run_history import read_history
from tests import workdirs
from tests.reporting.browser import incomplete_figures, measure, page_of
from tests.reporting.test_colors import COLORS

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
    ('width', 'fragment', 'background'),
    [(NARROW, '#dark', COLORS['background'].dark), (WIDE, '#light', COLORS['background'].light)],
)
def test_a_run(make_page, tmp_path, width, fragment, background):
    result = measure(make_page('finished'), tmp_path, width=width, fragment=fragment)
    check(result, width)
    titles = [chart['title'] for chart in result['charts']]
    assert [title for title in TITLES if title not in titles] == []
    assert result['background'] == color(background)


READ = """
const seen = () => [figure.querySelector('.hover').textContent, figure.querySelector('.legend b').textContent];
const over = figure.querySelector('.u-over'), box = over.getBoundingClientRect();
const where = { clientX: box.left + box.width / 2, clientY: box.top + 5, bubbles: true };
over.dispatchEvent(new MouseEvent('mouseenter', where));
over.dispatchEvent(new MouseEvent('mousemove', where));
steps.push(seen());
over.dispatchEvent(new MouseEvent('mouseleave', where));
steps.push(seen());
const plot = figure.querySelector('.plot');
const press = (key) => plot.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
plot.focus();
press('ArrowRight');
press('ArrowRight');
steps.push(seen(), figure.querySelector('.frame .spoken').textContent);
"""


def test_values_under_the_pointer_and_the_arrow_keys(make_page, tmp_path):
    pointed, after, pressed, spoken = measure(make_page('finished'), tmp_path, width=WIDE, actions=READ)['steps']
    # Step 200 is at the middle of the axis. When the pointer leaves, the last value is shown again.
    assert pointed == ['step 200', f'{workdirs.train_loss(200):.4g}']
    assert after == ['', f'{workdirs.train_loss(400):.4g}']
    assert pressed == ['step 20', f'{workdirs.train_loss(20):.4g}']
    assert spoken == f'step 20, training {workdirs.train_loss(20):.4g}, unigram entropy 5.25'


CONTROL = """
const count = () => colored(figure.querySelector('canvas'));
const controls = document.querySelector('.controls');
const set = (input, change) => { change(input); input.dispatchEvent(new Event('input', { bubbles: true }));
  input.dispatchEvent(new Event('change', { bubbles: true })); };
const settle = () => new Promise((resolve) => setTimeout(resolve, 50));
const plot = figure.querySelector('.plot');
const press = (key) => plot.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
const drag = async () => {
  const over = figure.querySelector('.u-over'), box = over.getBoundingClientRect();
  const fire = (name, share, target) => target.dispatchEvent(new MouseEvent(name, {
    clientX: box.left + share * box.width, clientY: box.top + 20, bubbles: true, movementX: 9 }));
  fire('mouseenter', 0.2, over);
  fire('mousemove', 0.2, over);
  fire('mousedown', 0.2, over);
  fire('mousemove', 0.6, over);
  await settle();
  fire('mouseup', 0.6, document);
  fire('mouseleave', 0.6, over);
};
const image = () => figure.querySelector('canvas').toDataURL();
await settle();
for (const [change, back] of [
  [() => set(controls.elements.smoothing, (input) => { input.value = 0.99; }),
   () => set(controls.elements.smoothing, (input) => { input.value = 0.8; })],
  [() => controls.elements.log.click(), () => controls.elements.log.click()],
  [() => press('+'), () => press('0')],
  [() => press('+'), () => controls.querySelector('button').click()],
  [drag, () => figure.querySelector('.u-over').dispatchEvent(new MouseEvent('dblclick', { bubbles: true }))],
  [() => figure.querySelector('.legend button').click(), () => figure.querySelector('.legend button').click()],
  [() => controls.elements.run[0].click(), () => controls.elements.run[0].click()],
]) {
  const before = image();
  await change();
  await settle();
  const changed = image() !== before;
  back();
  await settle();
  steps.push([changed, image() === before]);
}
"""


def test_each_control_changes_the_chart_and_can_be_undone(tmp_path):
    histories = []
    for name in ('a', 'b'):
        history = read_history(workdirs.finished(tmp_path / name))
        lines = [
            {**history.metrics[5], 'step': step, 'train/loss': 2 + step % 7 + 100 / step + (name == 'b')}
            for step in range(1, 400)
        ]
        histories.append(dataclasses.replace(history, metrics=lines))
    result = measure(page(make_runs(histories, workdirs.NOW)), tmp_path / 'page', width=WIDE, actions=CONTROL)
    assert result['steps'] == [[True, True]] * 7


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
    chart = '<figure><figcaption>Flat</figcaption><svg class="bar" width="200" height="50">{}</svg></figure>'
    body = f'<img src="{url}/x.png"><div style="width:500px">wide</div>{chart.format("<path>")}'
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
    content = policy().replace("'", '&#39;')
    meta = f'<meta http-equiv="Content-Security-Policy" content="{content}">'
    body = f'<img src="{url}/x.png"><script>fetch("{url}/z");</script>'
    actions = f'await fetch("{url}/y").catch(() => 0); await new Promise((resolve) => setTimeout(resolve, 50));'
    result = measure(page_of(body, meta), tmp_path, width=NARROW, actions=actions)
    assert requests == []
    assert {fault for fault in result['faults'] if fault.startswith('policy')} == {
        'policy: img-src',
        'policy: script-src-elem',
        'policy: connect-src',
    }
