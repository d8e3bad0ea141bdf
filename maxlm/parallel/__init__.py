"""The device mesh, logical axis rules, and memory of the host."""
