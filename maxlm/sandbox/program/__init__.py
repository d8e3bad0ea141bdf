"""Part of the sandbox that runs in the processes of an untrusted program and its tests."""
