"""Measured durations of test files and slow tests.

`launch/test.sh --times` measures them and writes `tests/durations.json`. The file lists the seconds of each test file
and of each test above `SLOW_SECONDS`, which include the test's share of the module's fixtures. The fast tier is also
measured alone: without the slow tests, fast tests compile the shared programs and may become slow.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / 'tests' / 'durations.json'
# Slower tests are marked `slow` and are not part of the fast tier.
SLOW_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Durations:
    """Seconds of each test file and of each slow test, by node id."""

    files: dict[str, float]
    slow: dict[str, float]

    @classmethod
    def load(cls) -> Durations:
        """Reads `durations.json`. If it does not exist, no test is slow."""
        return cls(**json.loads(FILE.read_text())) if FILE.exists() else cls({}, {})

    @classmethod
    def of_report(cls, report: dict[str, Any]) -> Durations:
        """Returns the durations in a report of `tests/time_report.py`."""
        slow = {name: seconds for name, seconds in report['tests'].items() if seconds > SLOW_SECONDS}
        return cls({name: round(file['seconds'], 1) for name, file in report['files'].items()}, slow)

    def with_slow_of(self, other: Durations) -> Durations:
        """Returns these durations with the slow tests of both measurements, each at its larger duration."""
        names = self.slow.keys() | other.slow.keys()
        slow = {name: max(self.slow.get(name, 0.0), other.slow.get(name, 0.0)) for name in names}
        return Durations(self.files, slow)

    def save(self) -> None:
        """Writes `durations.json`."""
        FILE.write_text(json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + '\n')

    def is_slow(self, nodeid: str) -> bool:
        return nodeid in self.slow

    def is_measured(self, nodeid: str) -> bool:
        """Returns True if the file that contains a test was measured."""
        return nodeid.partition('::')[0] in self.files

    def seconds_of_file(self, nodeid: str) -> float:
        """Returns the seconds of the file that contains a test; infinity if the file was not measured."""
        return self.files.get(nodeid.partition('::')[0], float('inf'))
