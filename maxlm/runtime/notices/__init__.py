"""Preemption and maintenance notices from the metadata servers of cloud providers."""
