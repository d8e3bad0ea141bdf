"""The training loop, which connects step, data, checkpoints and telemetry."""
