"""Data loader: the mixture, shuffle and windows that determine the batch of each step."""
