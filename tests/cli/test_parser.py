"""Argument parsers: ranges of numbers, shared options and help texts."""

import pytest

from maxlm.cli.parser import SHARED, command_parser, number
from maxlm.errors import InputError


@pytest.fixture
def parser():
    description = f'First {"word " * 30}end.\n\n    maxlm test {"--option " * 12}'
    parser = command_parser('test', description, '--seq-len=8', '--seq-len=8 --share=0.5')
    parser.add_argument('--seq-len', type=number(2), default=4)
    parser.add_argument('--share', type=number(0.1, 1, float))
    return parser


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('--seq-len=1', '--seq-len=1: must be at least 2'),
        ('--seq-len=x', "argument --seq-len: invalid int value: 'x' (see maxlm test --help)"),
        ('--share=1.5', '--share=1.5: must be from 0.1 to 1'),
        ('--share=nan', '--share=nan: must be from 0.1 to 1'),
        ('--share=x', "argument --share: invalid float value: 'x' (see maxlm test --help)"),
        ('--seq', 'unrecognized arguments: --seq (see maxlm test --help)'),
    ],
)
def test_invalid_arguments_are_one_line(parser, argument, message):
    with pytest.raises(InputError) as info:
        parser.parse_args([argument])
    assert str(info.value) == message


def test_valid_numbers(parser):
    options = parser.parse_args(['--seq_len=2', '--share=1'])
    assert (options.seq_len, options.share) == (2, 1.0)
    assert parser.parse_args([]).seq_len == 4


def test_a_command_can_change_a_shared_option(parser):
    parser.add_shared('--max-failures', '--config', required=False)
    parser.add_shared('--json', help='other')
    assert parser.parse_args(['--json']).max_failures == SHARED['--max-failures']['default']
    assert [action.help for action in parser._actions][-1] == 'other'
    # Control: the shared option itself is unchanged.
    assert SHARED['--config']['required'] is True


def test_help_wraps_paragraphs_but_no_commands(parser, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    paragraph, command = parser.format_help().split('First ')[1].split('options:')[0].split('\n\n')[:2]
    assert max(map(len, paragraph.splitlines())) <= 80 < len(command)
    assert parser.format_help().endswith(
        '\nexamples:\n  maxlm test --seq-len=8\n  maxlm test --seq-len=8 --share=0.5\n'
    )
