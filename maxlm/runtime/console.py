"""Standard output and error of a process, which may lose its terminal."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

from maxlm.errors import InputError, os_message


class _Output(io.FileIO):
    """Descriptor that discards text after its terminal was closed. If `is_optional`, it discards all failed writes."""

    def __init__(self, descriptor: int, *, is_optional: bool):
        super().__init__(descriptor, 'w', closefd=False)
        self.is_optional = is_optional

    def write(self, data: Any, /) -> int:
        """Writes data, or discards it.

        Raises:
            InputError: the disk of the file is full. Later output is discarded.
        """
        try:
            return super().write(data)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if error.errno != errno.EIO and not is_full and not self.is_optional:
                raise
            if error.errno in (errno.EIO, errno.EPIPE) or (is_full and not self.is_optional):
                # Libraries and child processes write to the descriptor too, and Python flushes it at its exit.
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            if is_full and not self.is_optional:
                raise InputError(
                    f'the output cannot be written ({os_message(error)}); write it to another disk'
                ) from None
            return len(memoryview(data).cast('B'))


_outputs: list[_Output] = []


def survive_lost_terminal(*, output_is_optional: bool) -> None:
    """Replaces `sys.stdout` and `sys.stderr` so that writes to a closed terminal discard the text.

    Otherwise they would raise an OSError, for example in the training loop or at the exit of the interpreter.

    Args:
        output_is_optional: discard text after all errors, such as a full disk, or a pipe without a reader as in
            `maxlm train | tee log`.
    """
    for name in ('stdin', 'stdout', 'stderr'):
        if getattr(sys, name) is None:
            # The process was started without the descriptor, as with `>&-`. The new stream uses it again. Otherwise
            # another file would, and would contain the output of libraries and child processes.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), 'r' if name == 'stdin' else 'w'))
    for name in ('stdout', 'stderr'):
        stream = getattr(sys, name)
        # A test may have replaced the stream.
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f'__{name}__'):
            continue
        stream.flush()
        output = _Output(stream.fileno(), is_optional=output_is_optional)
        _outputs.append(output)
        binary: Any = output if stream.write_through else io.BufferedWriter(output)
        text = io.TextIOWrapper(
            binary,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, text)


def make_output_optional() -> None:
    """Discards text after all errors from now on, because a signal ended this process and the readers of its output."""
    for output in _outputs:
        output.is_optional = True
