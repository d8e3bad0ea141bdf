"""Chats with a model in the terminal: `maxlm chat runs/chat`.

The checkpoint is that of a model trained on conversations: a workdir, `WORKDIR@STEP`, the directory of one step, or a
Hugging Face Transformers directory. /new starts a new conversation, /system TEXT sets its system prompt, and /quit or
Ctrl-D exits. Ctrl-C stops an answer. If a conversation does not fit the context, its oldest turns are dropped.

Lines of a pipe are answered one after another; the output then consists of the answers. Runs on one device.
"""

from __future__ import annotations

from maxlm.cli.parser import ArgumentParser, command_parser, number, text_argument
from maxlm.cli.process import run
from maxlm.errors import EXIT_DONE
from maxlm.storage.paths import ANY, PathOption


def main(argv: list[str]) -> int:
    """Answers lines until the end of the input."""
    options = make_parser().parse_args(argv)

    from maxlm.cli.execution.chat import execute

    execute(options)
    return EXIT_DONE


def make_parser() -> ArgumentParser:
    parser = command_parser('chat', __doc__, 'runs/chat', 'runs/chat --system="Answer briefly."')
    parser.add_shared('checkpoint', type=PathOption(urls=ANY))
    parser.add_argument('--system', type=text_argument, default='', help='system prompt (default: none)')
    parser.add_argument(
        '--max-tokens',
        type=number(0),
        default=0,
        help='maximum tokens of an answer; 0 = the rest of the context (default)',
    )
    parser.add_shared('--temperature', '--top-k', '--top-p', '--min-p', '--repetition-penalty', '--stop', '--seed')
    parser.add_shared('--kv-cache-dtype', '--draft-model', '--num-draft-tokens', '--quantize')
    return parser


if __name__ == '__main__':
    run('chat')
