"""Web pages of the server: the chat page and the API reference."""
