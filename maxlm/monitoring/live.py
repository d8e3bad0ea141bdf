"""Live dashboard, redrawn until the user quits."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live

from maxlm.errors import InputError
from maxlm.monitoring.dashboard_data import PLOTTED_METRICS, Curves, RunSnapshot, dashboard_data
from maxlm.monitoring.keyboard import Quit, keys
from maxlm.monitoring.screen import page, screen, table
from maxlm.telemetry.run_history import HistoryReader, RunHistory

# Interval at which keys and the size of the terminal are polled.
POLL_SECONDS = 0.1
NEXT_KEYS, BACK_KEYS = ('\t', 'n', '\x1b[C', '\x1b[B'), ('p', '\x1b[Z', '\x1b[D', '\x1b[A')


class Watcher:
    """Reads workdirs in a thread, so that a slow bucket does not delay keys and drawing."""

    def __init__(self, readers: Sequence[HistoryReader], interval: float):
        """Reads all workdirs once and starts the thread.

        Args:
            readers: one reader per workdir.
            interval: seconds between the end of one read and the start of the next.

        Raises:
            InputError: see `read_history`.
        """
        self._readers, self._interval = readers, interval
        self._histories = [reader.read() for reader in readers]
        self._version = 0
        self._read_event = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True, name='monitor')
        self._thread.start()

    def histories(self) -> tuple[int, list[RunHistory]]:
        """Returns the number of reads and the latest histories."""
        return self._version, list(self._histories)

    def read_now(self) -> None:
        """Requests an immediate read."""
        self._read_event.set()

    def _read(self) -> None:
        while True:
            self._read_event.wait(self._interval)
            self._read_event.clear()
            for number, reader in enumerate(self._readers):
                before = self._histories[number]
                try:
                    self._histories[number] = reader.read()
                except InputError as error:
                    # The workdir was readable before, so the error may be transient. Keep the last data.
                    note = f'cannot be read: {error}'
                    if note not in before.notes:
                        self._histories[number] = replace(before, notes=(*before.notes, note))
            self._version += 1


def watch(readers: Sequence[HistoryReader], *, interval: float, console: Console) -> None:
    """Shows runs in full screen until `q` or Ctrl-C is pressed.

    Args:
        readers: readers of the workdirs.
        interval: seconds between two reads.
        console: console of a terminal.

    Raises:
        InputError: a workdir cannot be read at the start.
    """
    watcher = Watcher(readers, interval)
    selected, last_drawn, next_draw = 0, None, 0.0
    runs: list[RunSnapshot] = []
    curves = [Curves(PLOTTED_METRICS) for _ in readers]
    help_line = 'q quit · r read now' + (' · Tab or number: select run' if len(readers) > 1 else '')
    try:
        with keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                version, histories = watcher.histories()
                view = version, selected, console.size
                if view != last_drawn or time.monotonic() >= next_draw:
                    width, height = console.size
                    runs = [
                        dashboard_data(history, time.time(), run_curves)
                        for history, run_curves in zip(histories, curves, strict=True)
                    ]
                    lines = screen(runs, selected, width, height, keys=help_line)
                    live.update(Group(*lines), refresh=True)
                    last_drawn, next_draw = view, time.monotonic() + interval
                key = keyboard.read_key(POLL_SECONDS)
                if key in ('q', 'Q', '\x03', '\x04'):
                    return
                if key == 'r':
                    watcher.read_now()
                if key in NEXT_KEYS:
                    selected = (selected + 1) % len(runs)
                elif key in BACK_KEYS:
                    selected = (selected - 1) % len(runs)
                elif key.isdecimal() and 1 <= int(key) <= len(runs):
                    selected = int(key) - 1
    except Quit:
        return


def show_once(readers: Sequence[HistoryReader], console: Console, *, now: float) -> None:
    """Prints the complete dashboard of each run once.

    Raises:
        InputError: a workdir cannot be read.
    """
    runs = [dashboard_data(reader.read(), now) for reader in readers]
    width = console.width
    lines = table(runs, -1, width) if len(runs) > 1 else []
    for number, run in enumerate(runs):
        if number:
            console.print()
        for line in [*(lines if not number else []), *page(run, width)]:
            line.rstrip()
            console.print(line, soft_wrap=True, highlight=False)
