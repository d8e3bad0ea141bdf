"""Answer parsing and rewards."""
