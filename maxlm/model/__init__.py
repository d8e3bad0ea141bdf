"""The decoder: pure functions of arrays. Knows neither the loss nor the optimizer."""
