"""What a check says: how it stands, what was found, what to do."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable


class CheckStatus(enum.StrEnum):
    """From best to worst; SKIPPED is what there was no reason, or no way, to look at."""

    SKIPPED = 'skipped'
    OK = 'ok'
    WARNING = 'warning'
    FAILURE = 'failure'


ORDER = list(CheckStatus)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One line of what was found; one of what to do, '' where all is well."""

    status: CheckStatus
    found: str
    remedy: str = ''


def ok(found: str) -> CheckResult:
    return CheckResult(CheckStatus.OK, found)


def warning(found: str, remedy: str) -> CheckResult:
    return CheckResult(CheckStatus.WARNING, found, remedy)


def failure(found: str, remedy: str) -> CheckResult:
    return CheckResult(CheckStatus.FAILURE, found, remedy)


def skipped(found: str) -> CheckResult:
    return CheckResult(CheckStatus.SKIPPED, found)


def together(findings: Iterable[CheckResult]) -> CheckResult:
    """Several findings of one check as one: as bad as the worst, which come first; the good ones are told if all are.

    Raises:
        ValueError: there are none.
    """
    ordered = sorted(findings, key=lambda finding: ORDER.index(finding.status), reverse=True)
    if not ordered:
        raise ValueError('a check that found nothing')
    bad = [finding for finding in ordered if finding.remedy] or ordered
    remedies = dict.fromkeys(finding.remedy for finding in bad if finding.remedy)
    return CheckResult(ordered[0].status, '; '.join(finding.found for finding in bad), '; '.join(remedies))
