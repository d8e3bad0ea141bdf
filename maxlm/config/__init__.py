"""Configuration of a run: the schema of its keys, their ranges and validation. Imports no model code."""
