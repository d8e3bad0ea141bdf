"""Commands that train, and that restart, show and report runs."""
