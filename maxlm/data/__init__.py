"""Text → tokens → records → batches, with NumPy and Grain. Never imports the model."""
