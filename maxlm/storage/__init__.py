"""Local and remote files: buckets, downloads, retries, atomic writes, JSON lines. Knows no run."""
