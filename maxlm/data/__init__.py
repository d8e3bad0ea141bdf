"""Text → tokens → records → batches, with NumPy and grain. Never imports the model."""
