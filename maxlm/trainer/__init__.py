"""The training loop: connects step, data, checkpoints and telemetry."""
