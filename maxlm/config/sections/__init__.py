"""Sections of the config that the schema imports."""
