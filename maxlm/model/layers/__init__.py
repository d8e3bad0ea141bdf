"""Layers of a block other than attention, and the key/value cache."""
