"""Python processes that serve requests within limits: start, messages, serving and forks."""
