"""The checks of `maxlm doctor`."""
