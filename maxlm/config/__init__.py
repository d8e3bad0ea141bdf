"""The config of a run.

    configs/1b.py:variant ──load──▶ ConfigDict ──overrides, rules──▶ Config (frozen) ──resolve──▶ Config (final numbers)

A config file is plain Python with `get_config(variant)`: it takes `load.default()`, sets what it wants and returns it.
"""
