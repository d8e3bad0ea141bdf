"""Whether a machine can do what a run will ask of it: each check alone, and all of them in order."""
