"""Results of checks: status, message and remedy."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable


class CheckStatus(enum.StrEnum):
    """Status of a check, from best to worst. SKIPPED: not applicable or not possible."""

    SKIPPED = 'skipped'
    OK = 'ok'
    WARNING = 'warning'
    FAILURE = 'failure'


ORDER = list(CheckStatus)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """Result of a check: a message, and a remedy, which is '' if there is no problem."""

    status: CheckStatus
    message: str
    remedy: str = ''


def ok(message: str) -> CheckResult:
    return CheckResult(CheckStatus.OK, message)


def warning(message: str, remedy: str) -> CheckResult:
    return CheckResult(CheckStatus.WARNING, message, remedy)


def failure(message: str, remedy: str) -> CheckResult:
    return CheckResult(CheckStatus.FAILURE, message, remedy)


def skipped(message: str) -> CheckResult:
    return CheckResult(CheckStatus.SKIPPED, message)


def combine(findings: Iterable[CheckResult]) -> CheckResult:
    """Combines several results of one check.

    The status is the worst one, whose messages come first. Good results are omitted unless all are good.

    Raises:
        ValueError: there are no results.
    """
    ordered = sorted(findings, key=lambda finding: ORDER.index(finding.status), reverse=True)
    if not ordered:
        raise ValueError('a check must have at least one result')
    bad = [finding for finding in ordered if finding.remedy] or ordered
    remedies = dict.fromkeys(finding.remedy for finding in bad if finding.remedy)
    return CheckResult(ordered[0].status, '; '.join(finding.message for finding in bad), '; '.join(remedies))
