"""Processes of a run: initialization, rendezvous, heartbeats, barriers, preemption, compilation cache and C++ code."""
