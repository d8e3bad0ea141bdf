"""The command line: commands, their options, the process of a command, and hints."""
