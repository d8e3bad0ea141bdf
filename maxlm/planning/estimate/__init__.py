"""Formulas for memory, FLOPs, transfers and time of a step."""
