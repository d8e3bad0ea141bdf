"""Local and remote files: buckets, downloads, retries, atomic writes and JSON lines. Independent of runs."""
