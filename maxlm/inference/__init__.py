"""A trained model at work: cached decoding and sampling."""
