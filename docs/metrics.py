"""Writes docs/metrics.md from the table of metrics."""

from pathlib import Path

from maxlm.telemetry.metrics import metrics_page

Path(__file__).with_suffix('.md').write_text(metrics_page(), encoding='utf-8')
