"""Directories of compiled programs that the processes of a test session share."""

import os
import tempfile
from pathlib import Path

from tools.cache import CACHE

NAME = 'MAXLM_TEST_PROGRAMS'
# The process that creates the directory deletes it. Workers and child processes inherit the variable.
IS_OWNER = NAME not in os.environ
if IS_OWNER:
    os.environ[NAME] = tempfile.mkdtemp(prefix='maxlm-programs-')
# Programs of child processes, which use JAX's own cache. Its files have no checksums, so each session starts anew.
PROGRAMS = Path(os.environ[NAME])
# Programs of the workers, which later and concurrent sessions reuse. Each file has a checksum, and its name contains
# hashes of the program, the flags, the version of jaxlib and the CPU's features. The total size is limited.
KEPT_PROGRAMS = CACHE / 'programs'
# Loading a program takes a sixth of the time of compiling it. Writing the many smaller programs would take longer than
# later sessions save.
MIN_COMPILE_SECONDS = 0.2
