"""Tests of the server, which are skipped if its extra is not installed."""

import pytest

pytest.importorskip('fastapi', reason='the extra serve')
