"""Chat templates, rendered and encoded with loss masks."""
