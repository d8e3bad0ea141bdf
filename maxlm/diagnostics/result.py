"""Results of checks: status, message and remedy."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable


class CheckStatus(enum.StrEnum):
    """From best to worst; SKIPPED: not applicable or not possible."""

    SKIPPED = 'skipped'
    OK = 'ok'
    WARNING = 'warning'
    FAILURE = 'failure'


ORDER = list(CheckStatus)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One line of what was found; one of what to do, '' where all is well."""

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
    """Several findings of one check as one: as bad as the worst, which come first; the good ones are told if all are.

    Raises:
        ValueError: there are none.
    """
    ordered = sorted(findings, key=lambda finding: ORDER.index(finding.status), reverse=True)
    if not ordered:
        raise ValueError('a check that found nothing')
    bad = [finding for finding in ordered if finding.remedy] or ordered
    remedies = dict.fromkeys(finding.remedy for finding in bad if finding.remedy)
    return CheckResult(ordered[0].status, '; '.join(finding.message for finding in bad), '; '.join(remedies))
