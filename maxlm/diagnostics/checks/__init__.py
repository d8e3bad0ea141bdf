"""Checks of `maxlm doctor`."""
