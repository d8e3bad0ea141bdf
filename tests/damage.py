"""Functions that damage a file as disks do, given its path and a random generator."""


def flip(path, rng):
    """Flips one bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path, rng):
    """Cuts the file short."""
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def remove(path, rng):
    """Removes the file."""
    path.unlink()
