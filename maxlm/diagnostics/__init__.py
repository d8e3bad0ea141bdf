"""Runs the checks of `maxlm doctor`."""
