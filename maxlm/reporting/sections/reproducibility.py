"""Reproducibility: command, config, versions and data of a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from maxlm.config.loading import to_json
from maxlm.reporting.drawing.html import Markup, code, join, note, section, table, tag
from maxlm.reporting.sections.config_diff import differences, shipped_config, varying_keys
from maxlm.reporting.sections.run_summary import ReportedRun
from maxlm.storage.json_fields import items, mapping, text


def reproducibility(runs: Sequence[ReportedRun]) -> Markup:
    """Returns command, config differences and versions for each run; for several runs also their differences."""
    parts = [_config_differences(runs)] if len(runs) > 1 else []
    for run in runs:
        heading = tag('h3', run.name) if len(runs) > 1 else Markup('')
        content = [part for part in (_command(run), _config(run), _versions(run)) if part]
        parts += [heading, *content] if content else []
    return section('reproduce', 'How to reproduce', *parts)


def _config_differences(runs: Sequence[ReportedRun]) -> Markup:
    rows = [[key, *map(_value, values)] for key, values in varying_keys([run.history.config for run in runs]).items()]
    if not rows:
        return note('The configs of these runs are the same.')
    return join(
        tag('h3', 'Config differences'),
        table(['key', *(run.name for run in runs)], rows, texts=tuple(range(len(runs) + 1))),
    )


def _command(run: ReportedRun) -> Markup:
    words = [str(word) for word in items(run.started, 'command')]
    git = mapping(run.started, 'git')
    remarks = []
    if commit := text(git, 'commit'):
        dirty = ', with uncommitted changes' if git.get('dirty') is True else ''
        remarks.append(f'maxlm at commit {commit}{dirty}.')
    if host := text(run.started, 'host'):
        remarks.append(f'Started on {host}.')
    parts = [code(shlex.join(words))] if words else []
    return join(*parts, *(note(remark) for remark in remarks))


def _config(run: ReportedRun) -> Markup:
    config = run.history.config
    if config is None:
        return Markup('')
    command = [str(word) for word in items(run.started, 'command')]
    shipped = shipped_config(command)
    parts = []
    if shipped is None:
        parts.append(note('The command names no config file of this version of maxlm; the full config is below.'))
    else:
        name, values = shipped
        rows = [
            [one.key, _value(one.shipped), _value(one.value), 'command line' if one.is_override else '']
            for one in differences(config, values, command)
        ]
        if rows:
            parts.append(table(['key', name, 'this run', 'set by'], rows, texts=(0, 1, 2, 3)))
            parts.append(note('Other differences were resolved at the start, unless the file has changed since.'))
        else:
            parts.append(note(f'The config is {name}, unchanged.'))
    parts.append(tag('details', tag('summary', 'Full config'), code(to_json(config))))
    return join(*parts)


def _versions(run: ReportedRun) -> Markup:
    rows = [[name, str(version)] for name, version in mapping(run.started, 'versions').items()]
    data = mapping(run.started, 'dataset')
    rows += [[f'data: {name}', _value(value)] for name, value in data.items() if name != 'sources']
    rows += [[f'data: weight of {name}', _value(weight)] for name, _, weight in run.dataset if weight is not None]
    return table(['version', ''], rows, texts=(0, 1)) if rows else Markup('')


def _value(value: object) -> str:
    return '' if value is None else str(value)
