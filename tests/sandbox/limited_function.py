"""A function for a limited process that does what its request asks for."""

import os
import time

from maxlm.errors import InputError

counts = []


def answer(request):
    """Exceeds a limit, raises an exception, ends the process or returns the request."""
    command, _, argument = request.decode().partition(' ')
    if command == 'loop':
        while True:
            pass
    if command == 'refuse':
        raise InputError(argument)
    if command == 'allocate':
        return bytes(int(argument))[:0]
    if command == 'recurse':
        return answer(request)
    if command == 'exit':
        os._exit(int(argument))
    if command == 'abort':
        os.abort()
    if command == 'sleep':
        time.sleep(float(argument))
    if command == 'pid':
        return str(os.getpid()).encode()
    if command == 'count':
        counts.append(1)
        return str(len(counts)).encode()
    return request
