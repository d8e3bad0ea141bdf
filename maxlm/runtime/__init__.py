"""The processes of a run: start, rendezvous, heartbeat, barrier, preemption, compilation cache."""
