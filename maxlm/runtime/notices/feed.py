"""Interface between the watcher and the metadata servers: notices, feeds and requests."""

from __future__ import annotations

import time
import urllib.request
from email.message import Message
from pathlib import Path
from typing import NamedTuple, Protocol

from maxlm.storage.json_text import parse_json

# Identification of the machine by its hypervisor. Containers can read it too.
DMI = Path('/sys/class/dmi/id')
# Delay after a failed request, doubled up to the maximum.
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
MAX_BYTES = 2**20


class Notice(NamedTuple):
    """Event reported by a metadata server.

    Attributes:
        id: identifies the event while it is pending.
        message: message for the log.
        must_stop: True if the run must stop.
    """

    id: str
    message: str
    must_stop: bool


class Feed(Protocol):
    """Source of notices.

    Attributes:
        name: part of a thread's name and of log lines.
        delay: seconds to wait before the next poll.
    """

    name: str
    delay: float

    def poll(self) -> list[Notice]:
        """Returns the pending notices. May wait for a change of them.

        Raises:
            Exception: the request failed, or the response is invalid.
        """


def read_dmi(name: str) -> str:
    """Returns a field of the machine's identification, or '' if there is none."""
    try:
        # Read the local file instead of querying the network, where the server's address may belong to anyone.
        return (DMI / name).read_text(encoding='utf-8', errors='replace').strip()
    except OSError:
        return ''


def request(url: str, headers: dict[str, str], *, timeout: float, method: str = 'GET') -> tuple[str, Message]:
    """Returns the text and the headers of a response.

    Raises:
        OSError, http.client.HTTPException: the request failed, or the response takes longer than `timeout`.
    """
    end = time.monotonic() + timeout
    # The metadata server is on the machine's own network, where proxies do not apply.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers, method=method), timeout=timeout) as response:
        text = bytearray()
        # The timeout of the socket applies to each part of the response.
        while len(text) < MAX_BYTES and (part := response.read1(MAX_BYTES - len(text))):
            text += part
            if time.monotonic() > end:
                raise TimeoutError(f'the response is not complete after {timeout:g} s')
        return text.decode('utf-8', 'replace').strip(), response.headers


def parse_object(text: str) -> dict[str, object]:
    """Returns a JSON object.

    Raises:
        ValueError: the text is not a JSON object.
    """
    return as_object(parse_json(text))


def as_object(value: object) -> dict[str, object]:
    """Returns a parsed JSON value that must be an object.

    Raises:
        ValueError: the value is not an object.
    """
    if not isinstance(value, dict):
        raise ValueError('the value must be a JSON object')
    return value
