"""Fake sky: fails for commands, options and task files that do not exist in SkyPilot, and otherwise exits with 0."""

import json
import os
import sys

from record import record


def fail(message):
    print(f'Error: {message}', file=sys.stderr)
    sys.exit(2)


record()
with open(f'{os.path.dirname(sys.argv[0])}/skypilot.json') as file:
    commands = json.load(file)['commands']
words = sys.argv[1:]
name = next((name for name in (' '.join(words[:2]), words[0]) if name in commands), None)
if name is None:
    fail(f'No such command {words[:2]}.')
rest = iter(words[len(name.split()) :])
arguments = []
for word in rest:
    if not word.startswith('-'):
        arguments.append(word)
        continue
    option, equals, _ = word.partition('=')
    takes_value = commands[name]['options'].get(option)
    if takes_value is None:
        fail(f'No such option: {option}')
    if equals and not takes_value:
        fail(f'Option {option} does not take a value.')
    if takes_value and not equals and next(rest, None) is None:
        fail(f'Option {option} requires an argument.')
if -1 < commands[name]['arguments'] < len(arguments):
    fail(f'Got unexpected extra arguments {arguments}')
if name.endswith('launch') and not os.path.isfile(arguments[0]):
    fail(f'{arguments[0]} does not exist')
