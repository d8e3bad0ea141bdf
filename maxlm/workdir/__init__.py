"""Files of a run: names, lock, step directories and uploads to a bucket."""
