"""One module per format that corpora come in: what a file can be cut into, and its documents."""
