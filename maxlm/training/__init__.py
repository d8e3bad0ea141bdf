"""The training step and run decisions: pure functions of arrays and numbers, without file or clock access."""
