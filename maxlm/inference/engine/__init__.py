"""The engine: continuous batching of requests over cache slots."""
