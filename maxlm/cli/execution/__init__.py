"""Implementations of commands, which import libraries only after the arguments are parsed."""
