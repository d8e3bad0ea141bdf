"""Accelerators: datasheets, detection, statistics and prices."""
