"""Writes the golden curve anew: `python -m tests.golden.write`, after the recipe was changed on purpose."""

import json
import tempfile
from pathlib import Path

from tests.conftest import make_dataset
from tests.golden.curve import FILE, golden_run

with tempfile.TemporaryDirectory() as folder:
    curve = golden_run(make_dataset(Path(folder)), Path(folder) / 'run')
FILE.write_text(json.dumps(curve, indent=1) + '\n')
