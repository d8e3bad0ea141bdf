"""Parses the arguments of maxlm's commands without running them."""

from unittest import mock

from maxlm.cli.commands import module_of
from maxlm.cli.parser import ArgumentParser
from maxlm.config.config_files import split_overrides
from maxlm.config.loading import load


class _ParsedError(Exception):
    """Contains the options of a command, which is stopped after it has parsed them."""


def parse(words):
    """Returns the options of a command. Raises InputError for unknown options, config keys and configs."""
    original = ArgumentParser.parse_args

    def parse_only(self, argv):
        raise _ParsedError(original(self, argv))

    verb, *argv = words
    with mock.patch.object(ArgumentParser, 'parse_args', parse_only):
        try:
            module_of(verb).main(argv)
        except _ParsedError as parsed:
            options = parsed.args[0]
    overrides, rest = split_overrides(argv)
    for word in rest:
        if word.startswith('--config='):
            load(word.removeprefix('--config='), overrides)
    return options
