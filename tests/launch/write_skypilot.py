"""Writes tests/launch/skypilot.json: the schemas of SkyPilot's task files, and the options of its commands.

SkyPilot has too many dependencies for the development environment. Run this in an environment of its own:

    pip install skypilot==VERSION
    python tests/launch/write_skypilot.py > tests/launch/skypilot.json
"""

import json
import sys
from typing import Any

COMMANDS = ('launch', 'logs', 'down', 'status', 'check', 'gpus list')
COMMANDS += ('jobs launch', 'jobs queue', 'jobs logs', 'jobs cancel')


def to_json_schema(node: Any) -> Any:
    """Returns a schema without SkyPilot's keyword for enumerations that ignore case."""
    if isinstance(node, dict):
        node = {name: to_json_schema(value) for name, value in node.items()}
        if choices := node.pop('case_insensitive_enum', None):
            node['pattern'] = f'^(?i:{"|".join(choices)})$'
    elif isinstance(node, (list, tuple)):
        node = [to_json_schema(value) for value in node]
    return node


def main() -> None:
    import click
    import sky
    from sky.client.cli.command import cli
    from sky.utils import schemas

    commands = {}
    for name in COMMANDS:
        command: Any = cli
        for word in name.split():
            command = command.commands[word]
        options = [it for it in command.params if isinstance(it, click.Option)]
        arguments = [it for it in command.params if isinstance(it, click.Argument)]
        commands[name] = {
            # True if the option takes a value.
            'options': {
                flag: not (it.is_flag or it.count) for it in options for flag in (*it.opts, *it.secondary_opts)
            },
            'arguments': -1 if any(it.nargs == -1 for it in arguments) else len(arguments),
        }
    # Clients accept unknown keys of job_recovery, for plugins of the server, which rejects them later.
    schemas._allow_additional_properties = lambda: False
    task = schemas.get_task_schema()
    # The SkyPilot configuration of a task, which launch/sky does not use, is half of all schemas.
    task['properties']['config'] = {'type': 'object'}
    found = {
        'version': sky.__version__,
        'commands': commands,
        'task': task,
        'resources': schemas.get_resources_schema(),
    }
    json.dump(to_json_schema(found), sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == '__main__':
    main()
