"""Directory of compiled programs that all processes of a test session share; deleted at its end."""

import os
import tempfile
from pathlib import Path

NAME = 'MAXLM_TEST_PROGRAMS'
# The process that creates the directory deletes it. Workers and child processes inherit the variable.
IS_OWNER = NAME not in os.environ
if IS_OWNER:
    os.environ[NAME] = tempfile.mkdtemp(prefix='maxlm-programs-')
PROGRAMS = Path(os.environ[NAME])
# Loading a program that compiles faster takes as long as compiling it.
MIN_COMPILE_SECONDS = 0.5
