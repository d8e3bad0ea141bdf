"""Sections of the config: the declarations of its keys, and the vocabulary of these declarations."""
