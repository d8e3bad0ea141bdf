"""The files of a run: names, lock, step directories, upload to a bucket."""
