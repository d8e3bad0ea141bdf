"""Clock that a test sets."""


class Clock:
    """Function that returns `now`, in seconds."""

    now = 100.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds
