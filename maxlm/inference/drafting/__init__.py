"""Drafts of the next tokens for speculative decoding: by prompt lookup or by a small model."""
