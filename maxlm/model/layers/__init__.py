"""Layers of a block without attention."""
