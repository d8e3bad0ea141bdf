"""Request schemas of the HTTP API, their errors, and the OpenAPI document."""
