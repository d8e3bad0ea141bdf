"""Creates the HTML report of runs from their files."""
