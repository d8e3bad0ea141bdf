"""Creates the report of one or more runs as a self-contained HTML file."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

import maxlm
from maxlm import formatting
from maxlm.config.serialization import to_json
from maxlm.log import logger
from maxlm.reporting import goodput, overview, records, scaling, training_charts
from maxlm.reporting.charts import MARKS, chart_data
from maxlm.reporting.config_diff import differences, shipped_config, varying_keys
from maxlm.reporting.costs import cost_rows, price_note
from maxlm.reporting.device_charts import device_charts, device_rows
from maxlm.reporting.expert_loads import LEVELS, load_maps
from maxlm.reporting.plan_vs_actual import plan_rows
from maxlm.reporting.run_summary import ReportedRun, make_runs
from maxlm.storage.atomic import replace_file
from maxlm.telemetry.run_history import RunHistory, read_history

NAME = 'report.html'
# File name of the page that compares several runs; it is written to the current directory.
COMPARISON = 'compare.html'
# Anchor → text of its link, in the order of the page.
SECTIONS = {
    'summary': '',
    'loss': 'Loss',
    'evaluation': 'Evaluation',
    'sources': 'Sources',
    'tokenizer': 'Tokenizer',
    'experts': 'Experts',
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
# Identifies our pages within their first bytes: the pages of this version, and those of older versions by their policy.
GENERATOR = '<meta name="generator" content="maxlm '
_OLD_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_START_BYTES = 1024
ASSETS, _TEMPLATES = Path(__file__).parent / 'assets', Path(__file__).parent / 'templates'
_STYLES, _SCRIPTS = ('uPlot.min.css', 'report.css'), ('uPlot.min.js', 'report.js')
# HTML does not allow control characters, and UTF-8 no surrogates; JSON can contain both.
_UNPRINTABLE = re.compile(r'[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]')

# Functions that the templates call.
_FUNCTIONS = (
    *(cost_rows, price_note, device_rows, differences, load_maps, plan_rows, shipped_config, to_json, varying_keys),
    *(goodput.bars, goodput.categories, goodput.category_rows, goodput.process_bars, goodput.shown_attempts),
    *(overview.headline, overview.problems, overview.tile_rows),
    *(records.evaluated, records.shown_events, records.shown_samples, records.tokenizer_table),
    *(scaling.scaling_rows, scaling.throughputs),
    *(training_charts.overfitting_note, training_charts.source_rows),
)


def write_at_end(workdir: Path) -> None:
    """Writes WORKDIR/report.html at the end of a run, and logs the throughput. Errors are logged as warnings."""
    try:
        history = read_history(workdir)
        write_page(workdir / NAME, [history])
        if line := scaling.closing_line(make_runs([history], time.time())[0]):
            logger.info(line)
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
    return not (start.startswith('<!doctype html>') and (GENERATOR in start or _OLD_POLICY in html.unescape(start)))


def write_page(path: Path, histories: list[RunHistory]) -> None:
    """Writes the page of one or more runs atomically.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(path, page(make_runs(histories, time.time())))


def page(runs: Sequence[ReportedRun]) -> str:
    """Renders the HTML report of one or several runs."""
    context = _context(runs)
    sections = {name: section(name, runs, context) for name in SECTIONS}
    context |= {'sections': {name: body for name, body in sections.items() if body}, 'version': maxlm.__version__}
    context |= {'style': _asset(*_STYLES), 'script': _asset(*_SCRIPTS), 'policy': policy()}
    return _environment().get_template('page.html').render(context)


def section(name: str, runs: Sequence[ReportedRun], context: dict[str, Any] | None = None) -> str:
    """Returns one of SECTIONS as HTML; '' if the runs have no data for it."""
    context = context or _context(runs)
    return _environment().get_template(f'{name}.html').render(context).strip()


def policy() -> str:
    """Returns the content security policy, which allows only our style sheet and script, and no external resource."""
    return f"default-src 'none'; style-src '{_hash(_asset(*_STYLES))}'; script-src '{_hash(_asset(*_SCRIPTS))}'"


@functools.cache
def _asset(*names: str) -> str:
    """Returns files of the package as one text."""
    return '\n'.join((ASSETS / name).read_text(encoding='utf-8') for name in names)


def _hash(source: str) -> str:
    return f'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'


def _context(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Returns the variables of the templates: the runs, and their charts as data."""
    losses, reasons = training_charts.loss_charts(runs)
    charts = {
        'loss': losses,
        'sources': training_charts.source_charts(runs),
        'curves': training_charts.metric_charts(runs),
        'devices': device_charts(runs),
    }
    num_charts = sum(map(len, charts.values())) or 1
    return {
        'runs': runs,
        'several': len(runs) > 1,
        'reasons': reasons,
        'charts': {name: [chart_data(chart, num_charts) for chart in some] for name, some in charts.items()},
    }


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.policies['json.dumps_kwargs'] = {'separators': (',', ':'), 'allow_nan': False}
    environment.filters |= {
        'count': formatting.format_int,
        'dollars': formatting.format_dollars,
        'median': statistics.median,
        'duration': formatting.format_duration,
        'percent': formatting.format_percent,
        'si': formatting.format_si,
        'time': formatting.format_time,
    }
    environment.globals |= {'CATEGORIES': goodput.LABELS, 'LEVELS': LEVELS, 'LINKS': SECTIONS, 'MARKS': MARKS}
    environment.globals |= {function.__name__: function for function in _FUNCTIONS}
    return environment


def _printable(value: Any) -> Any:
    """Replaces unprintable characters of a text, and None by ''. Text is escaped afterwards."""
    if type(value) is str:
        return _UNPRINTABLE.sub('\ufffd', value)
    return '' if value is None else value
