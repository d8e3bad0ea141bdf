"""Configuration of a run: its schema, validation and loading. Imports no model code."""
