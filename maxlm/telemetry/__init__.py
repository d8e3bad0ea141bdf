"""Metrics, events, goodput, alerts and trackers of a run, and readers for them."""
