"""Reads the Dockerfile, the files of its build context and the Compose files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from docker.utils import exclude_paths
from dockerfile_parse import DockerfileParser

from tests.conftest import ROOT

DOCKERFILE = ROOT / 'Dockerfile'


class Stage(NamedTuple):
    """A stage of the Dockerfile: the stage or image that it starts from, and its own instructions."""

    base: str
    instructions: list[tuple[str, str]]


def read_stages(path: Path = DOCKERFILE) -> tuple[dict[str, str], dict[str, Stage]]:
    """Returns the default of each build argument, and the stages by name."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for entry in DockerfileParser(str(path)).structure:
        name, value = entry['instruction'], entry['value']
        if name == 'ARG':
            argument, _, default = value.partition('=')
            arguments[argument] = default
        elif name == 'FROM':
            base, _, stage = value.partition(' AS ')
            stages[stage] = Stage(base, [])
        elif name != 'COMMENT':
            list(stages.values())[-1].instructions.append((name, value))
    return arguments, stages


ARGUMENTS, STAGES = read_stages()


def values(target: str, instruction: str) -> list[str]:
    """Returns the values of an instruction in a target and the stages that it starts from, in order."""
    if target.startswith('${'):
        target = ARGUMENTS[target[2:-1]]
    if target not in STAGES:
        return []
    stage = STAGES[target]
    return values(stage.base, instruction) + [value for name, value in stage.instructions if name == instruction]


def exec_form(target: str, instruction: str) -> list[str]:
    """Returns the words of the last ENTRYPOINT or CMD of a target."""
    return json.loads(values(target, instruction)[-1])


def health_check(target: str) -> list[str]:
    """Returns the command of the health check of a target."""
    [value] = values(target, 'HEALTHCHECK')
    return json.loads(value.split(' CMD ')[1])


def context_files(root: Path = ROOT) -> set[str]:
    """Returns the files that the build of an image receives."""
    patterns = [line for line in (ROOT / '.dockerignore').read_text().splitlines() if line and line[0] != '#']
    return {name for name in exclude_paths(str(root), patterns) if (root / name).is_file()}


def compose(*names: str, **variables: str) -> dict[str, Any]:
    """Returns a Compose file, merged with the files that override it, with the values of variables."""
    merged: dict[str, Any] = {}
    for name in names:
        text = re.sub(r'\$\{(\w+):-([^}]*)\}', lambda it: variables.get(it[1], it[2]), (ROOT / name).read_text())
        merged = _merge(merged, yaml.safe_load(text))
    return merged


def _merge(base: Any, override: Any) -> Any:
    if isinstance(base, dict) and isinstance(override, dict):
        return base | {key: _merge(base.get(key), value) for key, value in override.items()}
    return override


def maxlm_words(words: list[str]) -> list[str]:
    """Returns the arguments of maxlm in a command such as `maxlm train …` or `python -m maxlm.train …`."""
    if words[:2] == ['python', '-m'] and words[2].startswith('maxlm.'):
        return [words[2].removeprefix('maxlm.'), *words[3:]]
    assert words[0] == 'maxlm', shlex.join(words)
    return words[1:]
