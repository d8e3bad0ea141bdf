"""Tasks with verifiable rewards: arithmetic and program synthesis."""
