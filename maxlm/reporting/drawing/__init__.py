"""Charts and HTML of the report."""
