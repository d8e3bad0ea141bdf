"""The decoder: pure functions of arrays, independent of loss and optimizer."""
