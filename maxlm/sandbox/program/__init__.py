"""The part of the sandbox that runs beside an untrusted program."""
