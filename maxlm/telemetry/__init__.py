"""Metrics, events, goodput, alerts and trackers: written by a run and read back."""
