"""Numbers about models and machines."""
