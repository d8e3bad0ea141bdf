"""Token arrays: NumPy files and archives, the roles of their arrays, and the spans without padding."""
