"""Tests alerts by file, command and webhook. None of them can stop, delay or fail a run, or leak a secret."""

import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from maxlm.config.loading import build, default
from maxlm.config.sections.monitoring import AlertsConfig
from maxlm.errors import InputError
from maxlm.telemetry import alerts
from maxlm.telemetry.alerts import Alerts

SECRET = 'T0-not-a-real-secret'


class Hook:
    """A webhook on loopback that responds with `code` after `release` is set."""

    def __init__(self, code=200):
        self.bodies, self.code, self.release = [], code, threading.Event()
        self.release.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                hook.release.wait(60)
                hook.bodies.append(json.loads(self.rfile.read(int(self.headers['Content-Length']))))
                self.send_response(hook.code)
                if hook.code == 302:
                    self.send_header('Location', '/elsewhere')
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f'http://127.0.0.1:{self.server.server_port}/{SECRET}'

    def close(self):
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hook(monkeypatch):
    hook = Hook()
    monkeypatch.setenv('ALERTS_URL', hook.url)
    yield hook
    hook.close()
    # Log messages of a sender's thread must not reach the next test.
    for thread in threading.enumerate():
        if thread.name == 'alerts':
            thread.join(60)


@pytest.fixture(autouse=True)
def log(caplog, monkeypatch):
    # A Console of another test may have disabled propagation.
    monkeypatch.setattr(logging.getLogger('maxlm'), 'propagate', True)
    return caplog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_alerts_reach_all_destinations(tmp_path, hook, log):
    config = AlertsConfig(
        file='alerts.jsonl',
        command=f'cat > {tmp_path}/body; printf "%s|%s" "$MAXLM_ALERT_KIND" "$MAXLM_ALERT_MESSAGE" > {tmp_path}/words',
        webhook_env_var='ALERTS_URL',
    )
    workdir = tmp_path / 'my_run'
    workdir.mkdir()
    with Alerts(config, workdir) as sender:
        # The text contains a shell command and a newline.
        sender.send('storage', 'no "space" $(touch planted)\nleft')
    assert [record.getMessage() for record in log.records] == ['storage: no "space" $(touch planted) left']
    (line,) = lines(workdir / 'alerts.jsonl')
    assert (line['run'], line['kind'], line['message']) == ('my_run', 'storage', 'no "space" $(touch planted) left')
    assert json.loads((tmp_path / 'body').read_text()) == line
    text = f'my_run on {line["host"]}: storage: no "space" $(touch planted) left'
    assert (tmp_path / 'words').read_text() == f'storage|{text}'
    assert hook.bodies == [{'text': text}]
    assert list(tmp_path.rglob('planted')) == []


def test_without_destination_or_in_other_processes_alerts_are_only_logged(tmp_path, hook, log):
    for config, process in ((AlertsConfig(), 0), (AlertsConfig(file='x', webhook_env_var='ALERTS_URL'), 1)):
        with Alerts(config, tmp_path, process=process) as sender:
            sender.send('storage', 'away')
    assert len(log.records) == 2
    assert list(tmp_path.iterdir()) == []
    assert hook.bodies == []


def test_alerts_of_one_kind_are_rate_limited(tmp_path, log):
    with Alerts(AlertsConfig(file='sent'), tmp_path, interval_seconds=1000) as sender:
        sender.send('loss', '0')
        while not (tmp_path / 'sent').exists():
            time.sleep(0.01)
        for number in range(1, 6):
            sender.send('loss', str(number))
        sender.send('storage', 'away')
        while len(lines(tmp_path / 'sent')) < 2:
            time.sleep(0.01)
        assert [line['kind'] for line in lines(tmp_path / 'sent')] == ['loss', 'storage']
    # Closing does not wait for the interval.
    assert [(line['message'], line['held_back']) for line in lines(tmp_path / 'sent')] == [
        ('0', 0),
        ('away', 0),
        ('5', 4),
    ]
    assert len(log.records) == 7


def test_delayed_alert_is_sent_after_the_interval(tmp_path):
    with Alerts(AlertsConfig(file='sent'), tmp_path, interval_seconds=0.2) as sender:
        for number in range(3):
            sender.send('loss', str(number))
            while not (tmp_path / 'sent').exists():
                time.sleep(0.01)
        while len(lines(tmp_path / 'sent')) < 2:
            time.sleep(0.01)
        assert [line['message'] for line in lines(tmp_path / 'sent')] == ['0', '2']


def test_hanging_webhook_does_not_block_the_run(tmp_path, hook, monkeypatch):
    monkeypatch.setattr(alerts, 'CLOSE_SECONDS', 0.1)
    hook.release.clear()
    with Alerts(AlertsConfig(webhook_env_var='ALERTS_URL'), tmp_path) as sender:
        for number in range(1000):
            sender.send(f'kind {number % 10}', 'x')
        assert hook.bodies == []
    assert hook.bodies == []


def test_hanging_command_is_killed_with_its_children(tmp_path, monkeypatch, log):
    monkeypatch.setattr(alerts, 'SEND_SECONDS', 0.3)
    command = f'(sleep 3; touch {tmp_path}/late) & echo $$ > {tmp_path}/pid; wait'
    with Alerts(AlertsConfig(command=command), tmp_path) as sender:
        sender.send('loss', 'x')
    assert 'alerts.command: failed to send an alert (TimeoutExpired)' in log.text
    time.sleep(3.2)
    assert (tmp_path / 'pid').exists()
    assert not (tmp_path / 'late').exists()


@pytest.mark.parametrize('code', [403, 500, 302])
def test_failing_destination_is_reported_once_and_retried(tmp_path, hook, log, code):
    hook.code = code
    with Alerts(AlertsConfig(webhook_env_var='ALERTS_URL', command='exit 3', file='sent/x'), tmp_path) as sender:
        (tmp_path / 'sent').touch()
        for number in range(3):
            sender.send(f'kind {number}', 'x')
    assert len(hook.bodies) == 3
    warnings = [record.getMessage() for record in log.records if 'failed to send' in record.getMessage()]
    assert warnings == [
        'alerts.file: failed to send an alert (FileExistsError)',
        'alerts.command: failed to send an alert (exit code 3)',
        f'alerts.webhook_env_var: failed to send an alert (HTTP {code})',
    ]


@pytest.mark.parametrize(
    'url', [f'http://user:{SECRET}@localhost/x', f'http://127.0.0.1:1/{SECRET}', f'http://[{SECRET}']
)
def test_errors_do_not_reveal_the_url(tmp_path, monkeypatch, log, capfd, url):
    monkeypatch.setenv('ALERTS_URL', url)
    with Alerts(AlertsConfig(webhook_env_var='ALERTS_URL'), tmp_path) as sender:
        sender.send('loss', 'x')
    assert 'alerts.webhook_env_var: failed to send an alert' in log.text
    assert SECRET not in log.text + ''.join(capfd.readouterr())


def test_webhook_is_configured_by_variable_name(tmp_path, monkeypatch):
    def config(webhook):
        values = default()
        values.train.num_steps, values.train.global_batch_size = 1, 1
        values.model.num_layers, values.model.dim, values.model.num_heads = 1, 4, 1
        values.alerts.webhook_env_var = webhook
        return build(values).alerts

    with pytest.raises(
        InputError, match=r'alerts\.webhook_env_var: the value is not a valid variable name; set the name'
    ) as error:
        config(f'https://hooks.example/{SECRET}')
    assert SECRET not in str(error.value)
    monkeypatch.delenv('ALERTS_URL', raising=False)
    with pytest.raises(InputError, match=r'alerts\.webhook_env_var=ALERTS_URL'):
        Alerts(config('ALERTS_URL'), tmp_path)
    # Other processes of a run do not need the variable.
    Alerts(config('ALERTS_URL'), tmp_path, process=1)
