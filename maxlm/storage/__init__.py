"""Local and remote files, and what is read from them; knows no run."""
