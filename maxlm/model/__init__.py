"""Pure functions of arrays: token ids in, logits out. Knows neither the loss nor the optimizer."""
