"""The OpenAI-compatible HTTP server and the chat page."""
