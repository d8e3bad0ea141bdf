"""OpenAI-compatible HTTP server and chat page."""
