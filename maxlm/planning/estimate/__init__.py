"""Formulas for the memory, FLOPs, transfers and time of a step."""
