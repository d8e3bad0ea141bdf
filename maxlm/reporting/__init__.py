"""Pages about runs that are read without a server: what was trained, how it went, what it cost."""
