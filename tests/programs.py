"""Directory in which all processes of a test session share compiled programs. Nothing outlives the session."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

NAME = 'MAXLM_TEST_PROGRAMS'
# The process that creates the directory deletes it; workers and child processes inherit the variable.
IS_OWNER = NAME not in os.environ
if IS_OWNER:
    os.environ[NAME] = tempfile.mkdtemp(prefix='maxlm-programs-')
PROGRAMS = Path(os.environ[NAME])
# Reading a smaller program back takes as long as compiling it again.
MIN_COMPILE_SECONDS = 0.5
