"""Documents, conversations and preferences, and how records become them."""
