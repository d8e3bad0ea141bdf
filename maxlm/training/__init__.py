"""The training step: pure functions of arrays and numbers, without files and clocks."""
