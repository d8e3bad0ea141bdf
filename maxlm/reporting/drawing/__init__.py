"""Draws the charts and HTML of the report."""
