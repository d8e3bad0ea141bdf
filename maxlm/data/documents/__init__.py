"""Documents, conversations and preferences, and their parsers."""
