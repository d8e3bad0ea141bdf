"""Sections of the config whose keys are declared apart from the main schema."""
