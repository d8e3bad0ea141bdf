"""Processes of benchmarks that answer JSON lines on stdin with JSON lines, and idle while another one works."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


class Peer:
    """A process that prints a line when it is ready, and then answers each line of its standard input.

    Attributes:
        ready: the first line, which describes the peer.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self._name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.ready = self._answer()

    def work(self, **arguments: Any) -> dict[str, Any]:
        """Returns the answer of the process to `arguments`."""
        assert self._process.stdin
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        """Ends the process."""
        # communicate() waits for the process and closes its pipes.
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f'{self._name} exited with code {self._process.wait()}')
        answer: dict[str, Any] = json.loads(line)
        return answer
