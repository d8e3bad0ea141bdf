"""The training step and what it is made of: pure functions of arrays and numbers; no files, no clocks."""
