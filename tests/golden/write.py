"""Rewrites the golden curves after an intended change of the recipe: `python -m tests.golden.write`.

With arguments it only rewrites the named files: `python -m tests.golden.write short.json`.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.conftest import make_dataset
from tests.golden.curve import FULL, SHORT, golden_run

with tempfile.TemporaryDirectory() as folder:
    dataset = make_dataset(Path(folder))
    for golden in (SHORT, FULL):
        if not sys.argv[1:] or golden.file.name in sys.argv[1:]:
            curve = golden_run(golden, dataset, Path(folder) / golden.file.stem)
            golden.file.write_text(json.dumps(curve, indent=1) + '\n')
