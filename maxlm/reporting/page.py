"""Creates the report of one or more runs as a self-contained HTML file."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from pathlib import Path

import maxlm
from maxlm.formatting import format_time
from maxlm.log import logger
from maxlm.reporting.drawing.css import style
from maxlm.reporting.drawing.hover_script import SCRIPT
from maxlm.reporting.drawing.html import Markup, join, tag
from maxlm.reporting.sections.costs import costs
from maxlm.reporting.sections.curves import training_curves
from maxlm.reporting.sections.devices import devices_over_time
from maxlm.reporting.sections.events import events
from maxlm.reporting.sections.goodput import goodput
from maxlm.reporting.sections.overview import headline, summary
from maxlm.reporting.sections.plan_vs_actual import plan_vs_actual
from maxlm.reporting.sections.reproducibility import reproducibility
from maxlm.reporting.sections.run_summary import ReportedRun, make_runs
from maxlm.reporting.sections.samples import samples
from maxlm.reporting.sections.scaling import scaling
from maxlm.storage.atomic import replace_file
from maxlm.telemetry.run_history import RunHistory, read_history

NAME = 'report.html'
# File name of the page that compares several runs; it is written to the current directory.
COMPARISON = 'compare.html'
# Prevents the page from loading external resources, regardless of what a run wrote into it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# Upper bound for the length of a page up to its policy, which identifies our pages.
_START_BYTES = 1024
_SECTIONS = (
    summary,
    training_curves,
    goodput,
    costs,
    plan_vs_actual,
    devices_over_time,
    events,
    samples,
    scaling,
    reproducibility,
)
_LINKS = {
    'loss': 'Loss',
    'sources': 'Sources',
    'curves': 'Curves',
    'time': 'Time',
    'cost': 'Cost',
    'plan': 'Plan',
    'devices': 'Devices',
    'events': 'Events',
    'samples': 'Samples',
    'scaling': 'Scaling',
    'reproduce': 'Reproduce',
}


def write_at_end(workdir: Path) -> None:
    """Writes WORKDIR/report.html at the end of a training run. Errors are logged as warnings."""
    try:
        write_page(workdir / NAME, [read_history(workdir)])
    except Exception as error:
        # The run has finished and saved its state, so an error of its report must not change its exit status.
        logger.warning(f'{NAME} could not be written: {type(error).__name__}: {" ".join(str(error).split())}')


def is_foreign(path: Path) -> bool:
    """Returns True if a file exists that is not one of our pages, so `write_page` must not replace it.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.exists():
        return False
    if not path.is_file():
        return True
    with path.open('rb') as file:
        start = file.read(_START_BYTES).decode('utf-8', 'replace')
    return not (start.startswith('<!doctype html>') and POLICY in html.unescape(start))


def write_page(path: Path, histories: list[RunHistory]) -> None:
    """Writes the page of one or more runs atomically.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(path, page(make_runs(histories, time.time())))


def page(runs: Sequence[ReportedRun]) -> str:
    """Returns the page of at least one run."""
    body = join(*(part(runs) for part in _SECTIONS))
    names = ' and '.join([', '.join(run.name for run in runs[:-1]), runs[-1].name] if len(runs) > 1 else [runs[0].name])
    lead = headline(runs[0]) if len(runs) == 1 else f'Comparison of {len(runs)} runs.'
    links = [tag('a', words, href=f'#{name}') for name, words in _LINKS.items() if f'<section id="{name}"' in body]
    footer = f'Created by maxlm {maxlm.__version__} at {format_time(runs[0].now)} from '
    head = join(
        tag('meta', charset='utf-8'),
        tag('meta', http_equiv='Content-Security-Policy', content=POLICY),
        tag('meta', name='viewport', content='width=device-width, initial-scale=1'),
        tag('title', names),
        # The style sheet contains only constants, so it does not need to be escaped.
        tag('style', Markup(style())),
    )
    content = join(
        # #light and #dark override the color scheme of the reader's system.
        tag('i', id='light'),
        tag('i', id='dark'),
        tag('header', tag('h1', names), tag('p', lead, class_='lead'), tag('nav', *links) if links else ''),
        tag('main', body),
        tag('footer', tag('p', footer, ', '.join(run.history.workdir for run in runs), '.', class_='note')),
        tag('script', Markup(SCRIPT)),
    )
    return f'<!doctype html>\n<html lang="en">\n{tag("head", head)}\n{tag("body", content)}\n</html>\n'
