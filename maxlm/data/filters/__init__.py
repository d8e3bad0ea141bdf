"""Quality filters and deduplication of documents."""
