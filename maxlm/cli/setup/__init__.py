"""Commands before a run: configs, plans, checks of a machine, data and shell completion."""
