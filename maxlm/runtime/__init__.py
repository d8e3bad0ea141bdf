"""Processes of a run: initialization, rendezvous, heartbeats, barriers, preemption and compilation cache."""
