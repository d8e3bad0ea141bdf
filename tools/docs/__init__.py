"""Generators of the reference pages and figures of the documentation, and the hooks of its site."""
