"""Charts, numbers and HTML of the report."""
