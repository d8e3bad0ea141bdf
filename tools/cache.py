"""Directory in which test sessions keep files for later sessions: compiled programs, executed lines, real models."""

import os
from pathlib import Path

CACHE = Path(os.environ.get('MAXLM_TEST_CACHE') or '~/.cache/maxlm-tests').expanduser()
