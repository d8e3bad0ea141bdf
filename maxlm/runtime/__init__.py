"""Around the step: files, clocks, processes, signals."""
