"""Lines that name the command to run next, such as `maxlm generate` after a command that made or checked a model."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from maxlm.errors import InputError

# Environment variable: 0 hides the lines.
HINTS = 'MAXLM_HINTS'


def print_next(*command: str) -> None:
    """Prints a command line that the user can run next, on stderr, because stdout contains only results.

    MAXLM_HINTS=0 hides it.
    """
    if os.environ.get(HINTS) != '0':
        sys.stdout.flush()
        print(f'Next: {shlex.join(command)}', file=sys.stderr, flush=True)


def print_generate(checkpoint: str | Path) -> None:
    """Prints a command that generates text with a checkpoint, as the answer to a user if it is a chat model.

    A reward model generates no text, so the command exports it.

    Args:
        checkpoint: a workdir, `WORKDIR@STEP` or the directory of one step. A URL is not read for a hint.
    """
    if _is_reward_model(Path(str(checkpoint).partition('@')[0])):
        print_next('maxlm', 'hf', 'export', f'--checkpoint={checkpoint}', '--output=exported')
        return
    chat = ['--chat'] if _has_chat(Path(str(checkpoint).partition('@')[0])) else []
    print_next('maxlm', 'generate', f'--checkpoint={checkpoint}', *chat, '--prompt=Hello')


def _is_reward_model(path: Path) -> bool:
    """Returns True if a workdir, or the workdir of a step, is that of a reward model."""
    from maxlm.workdir.files import CONFIG, read_config

    for workdir in (path, path.parent.parent):
        if (workdir / CONFIG).is_file():
            try:
                return read_config(workdir).model.reward_head
            except InputError:
                return False
    return False


def _has_chat(path: Path) -> bool:
    """Returns True if a workdir, or the workdir of a step, has a chat template that can be used."""
    from maxlm.data.chat.encoder import ChatEncoder
    from maxlm.workdir.files import CHAT_TEMPLATE

    for workdir in (path, path.parent.parent):
        if (workdir / CHAT_TEMPLATE).is_file():
            try:
                ChatEncoder.load(workdir)
            except InputError:
                return False
            return True
    return False
