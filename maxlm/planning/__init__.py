"""Memory, time and cost of a run ahead of time."""
