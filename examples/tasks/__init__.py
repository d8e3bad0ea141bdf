"""Example tasks: arithmetic and program synthesis with verifiable rewards, and flags with preferences."""
