"""What can happen to a file on a disk: each takes its path and a random generator."""


def flip(path, rng):
    """One bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path, rng):
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def remove(path, rng):
    path.unlink()
