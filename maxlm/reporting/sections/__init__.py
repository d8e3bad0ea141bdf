"""The parts of the page, top to bottom; each takes the runs and gives HTML, '' where it has nothing to show."""
