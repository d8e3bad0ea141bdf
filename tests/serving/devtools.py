"""Controls a headless Chromium through the DevTools protocol."""

import base64
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time

from websockets.sync.client import connect

from tests.reporting.browser import find_browser

KEYS = {'Enter': ('Enter', 13, '\r'), 'Escape': ('Escape', 27, ''), 'Tab': ('Tab', 9, '')}
SHIFT, CONTROL = 8, 2


class Tab:
    """A browser with one page.

    Attributes:
        faults: errors reported by the console and the page.
        requests: addresses that the page requested.
    """

    def __init__(self, folder):
        command = [
            find_browser(),
            *('--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', '--no-first-run'),
            *('--disable-background-networking', '--disable-component-update', '--remote-debugging-port=0'),
            *(f'--user-data-dir={folder}', 'about:blank'),
        ]
        # The browser gets its own process group, since the program may be a script that starts the browser.
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
        )
        address = next(found[1] for line in self._process.stderr if (found := re.search(r'(ws://\S+)', line)))
        # A browser that writes more messages than the pipe holds would wait.
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        self._stack = contextlib.ExitStack()
        self._socket = self._stack.enter_context(connect(address, max_size=None, compression=None))
        self._ids = itertools.count(1)
        self._session = None
        self.faults, self.requests = [], []
        target = next(target for target in self.send('Target.getTargets')['targetInfos'] if target['type'] == 'page')
        given = {'targetId': target['targetId'], 'flatten': True}
        self._session = self.send('Target.attachToTarget', **given)['sessionId']
        for domain in ('Page', 'Runtime', 'Network', 'Log'):
            self.send(f'{domain}.enable')

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stderr.close()

    def send(self, method, **parameters):
        """Returns the result of a command, and records events that arrive before it."""
        number = next(self._ids)
        session = {'sessionId': self._session} if self._session else {}
        self._socket.send(json.dumps({'id': number, 'method': method, 'params': parameters, **session}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get('id') == number:
                assert 'error' not in message, message
                return message['result']
            self._note(message.get('method'), message.get('params', {}))

    def _note(self, method, params):
        if method == 'Runtime.exceptionThrown':
            self.faults.append(params['exceptionDetails'].get('exception', {}).get('description', 'exception'))
        elif method == 'Runtime.consoleAPICalled' and params['type'] in ('error', 'warning', 'assert'):
            self.faults.append(str(params['args']))
        elif method == 'Log.entryAdded' and params['entry']['level'] in ('error', 'warning'):
            self.faults.append(f'{params["entry"]["text"]} {params["entry"].get("url", "")}')
        elif method == 'Network.requestWillBeSent':
            self.requests.append(params['request']['url'])

    def look(self, *, width, height=800, dark=False, mobile=False):
        """Sets the window size and the color scheme of the system."""
        size = {'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': mobile}
        self.send('Emulation.setDeviceMetricsOverride', **size)
        scheme = {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}
        self.send('Emulation.setEmulatedMedia', features=[scheme])

    def open(self, url):
        """Opens a page and waits until it has loaded the model's name."""
        self.send('Page.navigate', url=url)
        self.until("document.getElementById('about')?.textContent || document.querySelector('.error')")

    def run(self, script):
        """Returns the value of an expression."""
        message = self.send('Runtime.evaluate', expression=script, awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in message, message
        return message['result'].get('value')

    def until(self, script, seconds=20):
        """Waits until an expression is true, or raises after a generous timeout."""
        end = time.monotonic() + seconds
        while not (value := self.run(f'Boolean({script})')):
            assert time.monotonic() < end, f'never true: {script}; {self.faults}'
            time.sleep(0.01)
        return value

    def texts(self, selector):
        """Returns the text of each matching element."""
        return self.run(f'[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)')

    def click(self, selector):
        """Clicks the center of the last matching element with mouse events."""
        script = (
            f'(() => {{ const found = [...document.querySelectorAll({json.dumps(selector)})].at(-1); '
            'found.scrollIntoView({ block: "nearest" }); const box = found.getBoundingClientRect(); '
            'return [box.x + box.width / 2, box.y + box.height / 2]; })()'
        )
        x, y = self.run(script)
        for kind in ('mouseMoved', 'mousePressed', 'mouseReleased'):
            self.send('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

    def type(self, text):
        """Types text at the cursor."""
        self.send('Input.insertText', text=text)

    def press(self, name, *, modifiers=0):
        """Presses a key."""
        key, code, text = KEYS[name]
        given = {'key': key, 'code': key, 'windowsVirtualKeyCode': code, 'modifiers': modifiers}
        self.send('Input.dispatchKeyEvent', type='keyDown', text='' if modifiers & CONTROL else text, **given)
        self.send('Input.dispatchKeyEvent', type='keyUp', **given)

    def picture(self, path):
        """Writes a screenshot."""
        path.write_bytes(base64.b64decode(self.send('Page.captureScreenshot', format='png')['data']))
