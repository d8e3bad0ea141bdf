"""Estimates the memory, FLOPs, transfers and time of a step without compiling it."""
