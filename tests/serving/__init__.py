"""Tests of the server; they are skipped without the extra that it needs."""

import pytest

pytest.importorskip('fastapi', reason='the extra serve')
