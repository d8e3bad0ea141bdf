"""The HTML report of runs, made from their files."""
