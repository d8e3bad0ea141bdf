"""A run on a terminal: what is shown of it, drawn as lines of text."""
