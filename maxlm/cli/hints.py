"""Lines that name the command to run next."""

from __future__ import annotations

import os
import shlex
import sys

# Environment variable: 0 hides the lines.
HINTS = 'MAXLM_HINTS'


def print_next(*words: str) -> None:
    """Prints a command line that the user can run next, on stderr, because stdout contains only results.

    MAXLM_HINTS=0 hides it.
    """
    if os.environ.get(HINTS) != '0':
        sys.stdout.flush()
        print(f'Next: {shlex.join(words)}', file=sys.stderr, flush=True)
