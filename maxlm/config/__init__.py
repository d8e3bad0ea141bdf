"""The config of a run: every key once, its range, and how the keys go together. Imports no model."""
