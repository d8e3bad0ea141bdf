"""Cleaning: what is left out of a corpus because it is poor or there already, and the report of it."""
