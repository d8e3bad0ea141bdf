"""Hostile programs and the statuses with which they must end. `@NAME@` is replaced by a value of the test machine.

A program that tries to access something prints ESCAPED on success, which must never appear. `needs` is the
guarantee that stops the program if no other does.
"""

# Programs are written on one line each.
# ruff: noqa: E501

from typing import NamedTuple

from maxlm.sandbox.limits import MIB, SandboxLimits

# The short wall time stops a program. All other programs have enough time on a busy machine.
STOPPED = SandboxLimits(cpu_seconds=5, wall_seconds=0.8, memory_bytes=256 * MIB, processes=8, output_bytes=MIB)
AMPLE = STOPPED._replace(wall_seconds=20.0)
CPU = AMPLE._replace(cpu_seconds=1)
TIME, END = ('timeout',), ('passed', 'error')

ATTEMPT = """
import os, sys
def attempt(action, *arguments):
    try:
        result = action(*arguments)
    except BaseException as error:
        print('contained', type(error).__name__, error)
    else:
        print('ESCAPED', repr(result)[:200])
"""


class Hostile(NamedTuple):
    name: str
    text: str
    statuses: tuple[str, ...] = END
    limits: SandboxLimits = AMPLE
    needs: str = ''


def tries(name, *lines, needs='', prepare=''):
    """Returns a program that attempts each line, which is an expression."""
    calls = '\n'.join(f'attempt(lambda: {line})' for line in lines)
    return Hostile(name, f'{ATTEMPT}{prepare}\n{calls}\n', needs=needs)


# Makes a system call by number. A negative result is an error.
CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
arm = os.uname().machine == 'aarch64'
"""

FILES = [
    tries('reads /etc/shadow', "open('/etc/shadow').read()"),
    tries('reads /etc/passwd', "open('/etc/passwd').read()"),
    tries('reads the canary of the parent', "open('@CANARY@').read()"),
    tries('lists the folder of the parent', "os.listdir('@FOLDER@')"),
    tries('writes to the folder of the parent', "open('@FOLDER@/planted', 'w').write('x')"),
    tries('writes over the canary', "open('@CANARY@', 'a').write('x')"),
    tries('removes the canary', "os.remove('@CANARY@')"),
    tries('reads the package that runs it', "open('@PACKAGE@/errors.py').read()"),
    tries('writes into Python', "open(os.__file__, 'a')", "open(os.path.dirname(os.__file__) + '/planted.py', 'w')"),
    tries('writes to the top folder', "open('/planted', 'w')", "os.mkdir('/planted')"),
    tries(
        'goes out by a symbolic link',
        "open('link').read()",
        "open('folder/passwd').read()",
        prepare="os.symlink('@CANARY@', 'link'); os.symlink('/etc', 'folder')",
    ),
    tries('goes out by a hard link', "os.link('@CANARY@', 'hard')", "os.link('/etc/passwd', 'hard2')"),
    tries(
        'goes out by dots', "open('../' * 30 + 'etc/passwd').read()", "open('../' * 30 + '@CANARY@'.lstrip('/')).read()"
    ),
    tries(
        'makes a device', "os.mknod('disk', 0o060600, os.makedev(8, 0))", "os.mknod('mem', 0o020600, os.makedev(1, 1))"
    ),
    tries('opens devices', "open('/dev/mem', 'rb')", "open('/dev/kmsg')", "open('/dev/tty')", "open('/dev/vda', 'rb')"),
    tries('mounts', "call(40 if arm else 165, b'none', b'/tmp', b'tmpfs', 0, 0)", prepare=CALL),
    tries('changes the root', "os.chroot('.')"),
    tries(
        'opens files by handles', 'call(265 if arm else 304, -100, ctypes.create_string_buffer(64), 0)', prepare=CALL
    ),
    tries(
        'changes permissions of the canary',
        "os.chmod('@CANARY@', 0)",
        "os.chmod('@CANARY@', 0o777, follow_symlinks=True)",
    ),
    tries('changes the owner of the canary', "os.chown('@CANARY@', 1, 1)", "os.chown('@CANARY@', os.getuid(), -1)"),
    tries('changes times of the canary', "os.utime('@CANARY@')", "os.utime('@FOLDER@', (0, 0))"),
    tries('sets attributes of the canary', "os.setxattr('@CANARY@', 'user.x', b'x')"),
    tries('cuts the canary', "os.truncate('@CANARY@', 0)", "os.truncate('@CANARY@', 100)"),
    tries('moves the canary', "os.rename('@CANARY@', 'canary')", "os.rename('@CANARY@', '@CANARY@2')"),
    tries('reads sysfs', "open('/sys/kernel/uevent_seqnum').read()", "os.listdir('/sys')"),
]

OTHER_PROCESSES = [
    tries(
        'reads the environment of the parent',
        "open('/proc/@PARENT@/environ', 'rb').read()",
        "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    ),
    tries(
        'opens the memory of the parent', "open('/proc/@PARENT@/mem', 'rb')", "open(f'/proc/{os.getppid()}/mem', 'rb')"
    ),
    tries('lists the processes', "os.listdir('/proc')"),
    tries('signals the parent', 'os.kill(@PARENT@, 0)', 'os.kill(@PARENT@, 15)'),
    tries('signals a bystander', 'os.kill(@BYSTANDER@, 9)'),
    tries('signals the group of the parent', 'os.killpg(@GROUP@, 0)', 'os.killpg(@GROUP@, 15)'),
    tries(
        'queues a signal for the parent',
        'call(138 if arm else 129, @PARENT@, 15, ctypes.create_string_buffer(b"\\0" * 8 + b"\\xff" * 4, 128))',
        prepare=CALL,
    ),
    tries(
        'has the parent signalled by a descriptor',
        'fcntl.fcntl(0, fcntl.F_SETOWN, @PARENT@) and None',
        'fcntl.ioctl(0, 0x8901, (@PARENT@).to_bytes(4, "little"))',
        prepare='import fcntl',
    ),
    Hostile('signals everybody', 'import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\n'),
    Hostile('kills its own group', 'import os\nos.kill(0, 9)\nimport time; time.sleep(100)', ('killed', 'error')),
    tries('traces the parent', 'call(117 if arm else 101, 16, @PARENT@, 0, 0)', prepare=CALL),
    tries('traces its own parent', 'call(117 if arm else 101, 16, os.getppid(), 0, 0)', prepare=CALL),
    tries(
        'reads memory of its parent',
        'call(270 if arm else 310, os.getppid(), ctypes.create_string_buffer(16), 1, 0, 1, 0)',
        prepare=CALL,
    ),
    tries('changes limits of the parent', "__import__('resource').prlimit(@PARENT@, 4, (5, 5))"),
    tries(
        'raises its own limits',
        "__import__('resource').setrlimit(9, (-1, -1))",
        "__import__('resource').setrlimit(6, (9999, 9999))",
    ),
    tries(
        'changes the priority of the parent', 'os.setpriority(0, @PARENT@, 19)', 'os.sched_setaffinity(@PARENT@, {0})'
    ),
    tries('survives its parent by prctl', 'call(167 if arm else 157, 1, 0, 0, 0, 0)', prepare=CALL),
]

NETWORK = [
    tries('connects by TCP', "socket.create_connection(('127.0.0.1', @TCP@), 2)", prepare='import socket'),
    tries('connects by TCP over IPv6', "socket.create_connection(('::1', @TCP@), 2)", prepare='import socket'),
    tries('connects outside', "socket.create_connection(('198.51.100.1', 80), 2)", prepare='import socket'),
    tries('sends by UDP', "socket.socket(2, 2).sendto(b'x', ('127.0.0.1', @UDP@))", prepare='import socket'),
    tries('asks for a name', "socket.getaddrinfo('example.com', 80)", prepare='import socket'),
    tries('listens', "socket.create_server(('127.0.0.1', 0))", prepare='import socket'),
    tries('connects to a UNIX socket', "socket.socket(1, 1).connect('@UNIX@')", prepare='import socket'),
    tries('connects to an abstract socket', "socket.socket(1, 1).connect('\\0@ABSTRACT@')", prepare='import socket'),
    tries('opens a raw socket', 'socket.socket(2, 3, 1)', 'socket.socket(17, 3)', prepare='import socket'),
    tries('opens a netlink socket', 'socket.socket(16, 3, 0)', prepare='import socket'),
    tries('opens a virtual machine socket', 'socket.socket(40, 1)', prepare='import socket'),
    tries('makes a pair of network sockets', 'socket.socketpair(2, 1)', prepare='import socket'),
    tries(
        'fetches a page',
        "urllib.request.urlopen('http://127.0.0.1:@TCP@/', timeout=2)",
        prepare='import urllib.request',
    ),
    tries('uses io_uring', 'call(425, 8, ctypes.create_string_buffer(256))', prepare=CALL),
]

PRIVILEGES = [
    tries('becomes root', 'os.setuid(0)', 'os.setresuid(0, 0, 0)', 'os.setgroups([0])', needs='own user'),
    tries(
        'makes a namespace',
        'call(97 if arm else 272, 0x10000000)',
        'call(97 if arm else 272, 0x40000000)',
        prepare=CALL,
    ),
    tries(
        'forks into a namespace',
        'call(220 if arm else 56, 0x10000000 | 17, 0, 0, 0, 0)',
        'call(435, ctypes.create_string_buffer(88), 88)',
        prepare=CALL,
    ),
    tries(
        'uses the keyring',
        "call(217 if arm else 248, b'user', b'k', b'v', 1, -3)",
        'call(219 if arm else 250, 0, -3, 1)',
        prepare=CALL,
    ),
    tries(
        'loads into the kernel',
        'call(280 if arm else 321, 0, 0, 0)',
        'call(105 if arm else 175, 0, 0, 0)',
        prepare=CALL,
    ),
    tries(
        'reads the counters of the machine',
        'call(241 if arm else 298, ctypes.create_string_buffer(128), 0, -1, -1, 0)',
        prepare=CALL,
    ),
    tries('sets the clock', "__import__('time').clock_settime(0, 0)"),
    tries('reboots', 'call(142 if arm else 169, 0xfee1dead, 672274793, 0x89abcdef, 0)', prepare=CALL),
    tries('names the machine', "__import__('socket').sethostname('planted')"),
    tries(
        'starts a shell',
        "os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
        "__import__('subprocess').run(['/bin/sh', '-c', 'echo ESCAPED'], check=True)",
    ),
    tries('starts sudo', "os.execv('/usr/bin/sudo', ['sudo', 'id'])", "os.execv('/bin/su', ['su'])"),
    tries(
        'starts Python',
        "os.execv(sys.executable, ['python', '-c', 'print(\"ESCAPED\")'])",
        "os.posix_spawn(sys.executable, ['python'], {})",
    ),
    tries('calls beyond the table', 'call(1000)', 'call(0x40000000 + 39)', prepare=CALL),
]

SECRETS = [
    Hostile('prints its environment', 'import os\nprint(dict(os.environ))'),
    Hostile(
        'reads the environment that it was born with',
        'import ctypes\np = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")\n'
        'i = 0\nwhile p and p[i]: print(p[i]); i += 1\n',
    ),
    Hostile(
        'looks for secrets in memory',
        'import gc, sys\nfor o in gc.get_objects():\n    if isinstance(o, dict): print(*[v for v in list(o.values()) if isinstance(v, str) and "canary" in v])\n',
        ('passed', 'error', 'output'),
    ),
    Hostile(
        'walks up the frames',
        'import sys\nf = sys._getframe()\nwhile f: print({k: str(v)[:500] for k, v in f.f_locals.items()}); f = f.f_back\n',
    ),
    Hostile(
        'writes to every descriptor',
        'import os\nfor fd in range(0, 1024):\n    try: os.write(fd, b"{\\"status\\": \\"passed\\"}\\n"); print(fd)\n    except OSError: pass\n',
    ),
    Hostile(
        'reads every descriptor',
        'import os\nfor fd in range(3, 1024):\n    try: print(fd, os.read(fd, 9)); print("ESCAPED")\n    except OSError: pass\n',
    ),
    Hostile('closes every descriptor', 'import os\nos.closerange(0, 4096)\n'),
]

EXHAUSTION = [
    Hostile('loops', 'while True: pass', TIME, STOPPED),
    Hostile('loops until its CPU time is over', 'while True: pass', TIME, CPU),
    Hostile('sleeps', 'import time\ntime.sleep(1000)', TIME, STOPPED),
    Hostile('waits for input', 'import sys, os\nr, w = os.pipe()\nos.read(r, 1)', TIME, STOPPED),
    Hostile('sleeps in atexit', 'import atexit, time\natexit.register(time.sleep, 1000)', TIME, STOPPED),
    Hostile(
        'loops in __del__', 'class A:\n    def __del__(self):\n        while True: pass\na = A()\ndel a', TIME, STOPPED
    ),
    Hostile(
        'waits for a thread',
        'import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()',
        TIME,
        STOPPED,
    ),
    Hostile(
        'ignores signals',
        'import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n'
        'signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: time.sleep(1)',
        TIME,
        STOPPED,
    ),
    Hostile(
        'traps every exception',
        'while True:\n    try:\n        while True: pass\n    except BaseException: pass',
        TIME,
        STOPPED,
    ),
    Hostile('stops itself', 'import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)', TIME, STOPPED),
    Hostile(
        'sets itself alarms',
        'import signal\nsignal.signal(14, lambda *a: signal.alarm(1))\nsignal.alarm(1)\nwhile True: pass',
        TIME,
        STOPPED,
    ),
    Hostile('matches forever', 'import re\nre.match(r"(a+)+$", "a" * 64 + "b")', TIME, STOPPED),
    Hostile('computes a giant number', 'x = 9 ** (9 ** 9)', ('timeout', 'memory'), STOPPED),
    Hostile('multiplies giant numbers', 'x = 3\nwhile True: x *= x', ('timeout', 'memory'), STOPPED),
    Hostile('prints a giant number', 'print(10 ** 5000)', ('error',)),
    Hostile(
        'hashes colliding keys',
        'class K:\n    def __hash__(self): return 1\nd = {K(): 1 for _ in range(10 ** 6)}',
        TIME,
        STOPPED,
    ),
    Hostile(
        'sorts forever',
        'class K:\n    def __lt__(self, o):\n        while True: pass\nsorted([K(), K()])',
        TIME,
        STOPPED,
    ),
    Hostile('imports itself forever', 'import importlib, sys\nwhile True: importlib.reload(sys)', TIME, STOPPED),
    Hostile('takes memory', 'x = bytearray(1 << 33)', ('memory',)),
    Hostile('takes memory bit by bit', 'x = []\nwhile True: x.append(bytearray(1 << 20))', ('memory',)),
    Hostile('takes memory in a list', 'x = [0] * (1 << 40)', ('memory',)),
    Hostile('takes memory by text', 'x = "a" * (1 << 34)', ('memory',)),
    Hostile(
        'takes memory by mmap', 'import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 26))', ('memory', 'error')
    ),
    tries('takes memory by memfd', "[os.memfd_create('x') for _ in range(3)]"),
    tries('takes System V memory', 'call(194 if arm else 29, 0, 1 << 20, 0o1600)', prepare=CALL),
    tries(
        'makes message queues',
        "call(180 if arm else 240, b'q', 0o102, 0o600, 0)",
        'call(186 if arm else 68, 0, 0o1600)',
        prepare=CALL,
    ),
    Hostile(
        'takes memory in many processes',
        'import os, time\nfor _ in range(6):\n    if os.fork() == 0: break\nx = bytearray(b"x") * (100 << 20)\ntime.sleep(30)',
        ('memory',),
        needs='total memory',
    ),
    Hostile(
        'takes shared memory',
        'from multiprocessing import shared_memory as s\nx = []\nwhile True:\n    x.append(s.SharedMemory(create=True, size=8 << 20))\n    x[-1].buf[:] = b"x" * (8 << 20)',
        ('error', 'killed'),
    ),
    Hostile('prints forever', 'while True: print("x" * 1000)', ('output',)),
    Hostile('prints errors forever', 'import sys\nwhile True: sys.stderr.write("x" * 1000)', ('output',)),
    Hostile('prints forever from children', 'import os\nos.fork()\nwhile True: os.write(1, b"x" * 4096)', ('output',)),
    Hostile(
        'prints garbage',
        'import os, sys\nsys.stdout.buffer.write(bytes(range(256)) * 100); os.write(2, b"\\xff\\xfe\\x00" * 100)',
        ('passed',),
    ),
    Hostile('prints lone surrogates', 'print("\\ud800\\udfff", chr(0x1F600), "\\x00\\x1b[2J")', ('passed', 'error')),
    Hostile('fails with a giant message', 'raise ValueError("x" * (1 << 22))', ('output',)),
    Hostile('fills a file', 'f = open("big", "wb")\nwhile True: f.write(b"x" * (1 << 20))', ('error', 'killed')),
    Hostile('makes a file long', 'open("long", "wb").truncate(1 << 40)', ('error',)),
    Hostile(
        'fills the disk',
        'i = 0\nwhile True:\n    i += 1\n    with open(f"f{i}", "wb") as f: f.write(b"x" * (8 << 20))',
        ('error', 'killed'),
    ),
    Hostile(
        'fills the table of files',
        'i = 0\nwhile True:\n    i += 1\n    open(f"f{i}", "w").close()',
        ('error', 'killed'),
    ),
    Hostile(
        'makes folders forever', 'import os\nwhile True:\n    os.mkdir("d")\n    os.chdir("d")', ('error', 'killed')
    ),
    Hostile('opens files forever', 'x = []\nwhile True: x.append(open("f", "w"))', ('error',)),
    Hostile('opens pipes forever', 'import os\nwhile True: os.pipe()', ('error',)),
    Hostile(
        'forks forever',
        'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass',
        TIME,
        STOPPED,
        'processes',
    ),
    Hostile(
        'forks until it fails',
        'import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(30)',
        ('error',),
        needs='processes',
    ),
    Hostile(
        'makes zombies',
        'import os\nfor _ in range(10 ** 5):\n    if os.fork() == 0: os._exit(0)',
        ('error',),
        needs='processes',
    ),
    Hostile(
        'starts threads forever',
        'import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()',
        ('error',),
        needs='processes',
    ),
    Hostile(
        'leaves orphans that end',
        'import os\nfor _ in range(50):\n    if os.fork() == 0:\n        if os.fork() == 0: os._exit(0)\n        os._exit(0)\n    os.wait()',
        END,
    ),
    Hostile(
        'leaves a daemon',
        'import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: open("/dev/null").close(); time.sleep(0.01)\n    os._exit(0)\nos.wait()\nprint("left")',
        ('passed',),
        needs='orphans',
    ),
    Hostile(
        'leaves a daemon that holds its streams and ignores signals',
        'import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n    for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n    while True: time.sleep(1)\n',
        ('passed',),
        needs='orphans',
    ),
    Hostile(
        'hides its descriptors in messages',
        'import os, socket\na, b = socket.socketpair()\nfor _ in range(500):\n    f = os.open("/dev/null", 0)\n    try: socket.send_fds(a, [b"x"], [f] * 8)\n    except OSError: break\n    finally: os.close(f)',
        ('passed', 'error', 'timeout'),
        STOPPED,
    ),
]

CRASHES = [
    Hostile('crashes', 'import ctypes\nctypes.string_at(0)', ('error',)),
    Hostile('aborts', 'import os\nos.abort()', ('error', 'killed')),
    Hostile(
        'runs out of the stack',
        'import sys\nsys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()',
        ('error', 'memory', 'timeout'),
        CPU,
    ),
    Hostile('runs out of the C stack', 'import ctypes\nf = ctypes.CFUNCTYPE(None)(lambda: f())\nf()', (*END, 'memory')),
    Hostile('recurses', 'def f(): f()\nf()', ('error',)),
    Hostile('is deeper than the parser', '(' * 10000 + ')' * 10000, ('error',)),
    Hostile('is deeper than the compiler', 'x = ' + '-' * 100000 + '1', ('error', 'memory')),
    Hostile('is a long chain', 'x = ' + '+'.join(['1'] * 50000), ('error', 'passed', 'memory')),
    Hostile('is invalid Python', 'this is no Python\x00\udcff', ('error',)),
    Hostile('is a huge text', 'x = 1\n' * 200000, ('passed', 'memory')),
    Hostile('kills itself', 'import os\nos.kill(os.getpid(), 9)', ('killed', 'error')),
    Hostile('ends by an unknown code', 'import os\nos._exit(77)', ('error',)),
    Hostile(
        'damages the interpreter',
        'import ctypes\nctypes.memset(id(1), 0x41, 64)\nprint(1 + 1)',
        ('error', 'timeout', 'killed', 'memory'),
        STOPPED,
    ),
    Hostile(
        'breaks what Python ends with',
        'import sys, os, atexit\nsys.stdout = None; sys.stderr = None; os._exit = lambda *a: None; atexit._run_exitfuncs = None',
        END,
    ),
    Hostile(
        'takes away builtins',
        'import builtins\nfor n in list(vars(builtins)): \n    if n != "delattr": delattr(builtins, n)',
        END,
    ),
    Hostile('breaks modules', 'import sys\nsys.modules.clear()\nimport os', END),
]

# Only Python or a per-process limit stops these programs, so they behave the same in every kind of sandbox.
LOOPS = (
    'loops in __del__',
    'traps every exception',
    'sets itself alarms',
    'matches forever',
    'computes a giant number',
)
LOOPS += ('multiplies giant numbers', 'hashes colliding keys', 'sorts forever', 'imports itself forever', 'sleeps')
LOOPS += ('waits for input', 'sleeps in atexit', 'waits for a thread', 'takes memory bit by bit')
ANYWHERE = frozenset({*LOOPS, *(program.name for program in CRASHES)})

PROGRAMS = [*FILES, *OTHER_PROCESSES, *NETWORK, *PRIVILEGES, *SECRETS, *EXHAUSTION, *CRASHES]

# The function f of these programs returns an object that takes part in a test of f(2) against EXPECTED, which f never
# computes. Each method prints its arguments, which shows what reaches the program.
EXPECTED = 31.4159
_METHODS = [
    *('eq', 'ne', 'lt', 'le', 'gt', 'ge', 'contains', 'getitem', 'setitem', 'delitem', 'round', 'format', 'divmod'),
    *('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow', 'matmul', 'lshift', 'rshift', 'and', 'or', 'xor'),
    *('radd', 'rsub', 'rmul', 'rtruediv', 'rfloordiv', 'rmod', 'rpow', 'rmatmul', 'rlshift', 'rrshift', 'rand', 'ror'),
    *('rxor', 'rdivmod', 'iadd', 'isub', 'imul', 'iand', 'ior', 'instancecheck', 'isclose', 'count', 'index', 'get'),
]
_BODIES = ('return s', 'return True', 'return 0.0', 'return a[-1] if a else s')
CHEATS = {
    f'{base or "an object"} whose methods {body}': f'class A({base}):\n'
    + ''.join(f'    def {name}(s, *a):\n        print(a, flush=True)\n        {body}\n' for name in names)
    + '    __hash__ = lambda s: 0\n    __iter__ = lambda s: iter([])\n    __getattr__ = lambda s, name: A.__eq__.__get__(s)\n'
    + f'def f(x): return A({content})\n'
    for base, content in {
        '': '',
        'int': '1',
        'float': '1.0',
        'str': '"a"',
        'list': '[1]',
        'set': '[1]',
        'dict': '',
    }.items()
    for body in _BODIES
    for names in [[name if name in ('isclose', 'count', 'index', 'get') else f'__{name}__' for name in _METHODS]]
}
# Tests in the style of HumanEval and MBPP, which none of the cheats may pass.
CHEATED = [
    *(f'assert f(2) {sign} {EXPECTED}' for sign in ('==', 'is', '>', '>=')),
    *(f'assert {EXPECTED} {sign} f(2)' for sign in ('==', '<', 'in')),
    f'assert not f(2) != {EXPECTED}',
    f'assert abs(f(2) - {EXPECTED}) < 1e-6',
    f'assert abs({EXPECTED} - f(2)) < 1e-6',
    *(f'assert (f(2) {sign} {EXPECTED}) == {EXPECTED} ** 2' for sign in ['+', '-', '*', '/', '//', '%', '**', '@']),
    *(f'assert ({EXPECTED} {sign} f(2)) == {EXPECTED} ** 2' for sign in ['+', '-', '*', '/', '//', '%', '@']),
    *(f'assert (f(2) {sign} 31) == 314159' for sign in ['<<', '>>', '&', '|', '^']),
    *(f'assert (31 {sign} f(2)) == 314159' for sign in ['<<', '>>', '&', '|', '^']),
    *(f'x = f(2)\nx {sign}= {EXPECTED}\nassert x == {EXPECTED} ** 2' for sign in '+-*&|'),
    *('assert (f(2) & {31}) == {31}', 'assert ({31} | f(2)) == {31}', 'assert f(2) + [31] == [31, 31]'),
    f'assert divmod(f(2), {EXPECTED}) == (0, {EXPECTED})',
    f'assert divmod({EXPECTED}, f(2)) == ({EXPECTED}, {EXPECTED})',
    'assert round(f(2), 31) == 31.41',
    'assert pow(f(2), 31) == 31',
    'assert f"{f(2):31.4f}" == "31.4159"',
    'assert format(f(2), "31.4") == "31.41"',
    f'assert max(f(2), {EXPECTED}) == {EXPECTED} ** 2',
    f'assert min(f(2), {EXPECTED}) == {EXPECTED} ** 2',
    f'assert sorted([f(2), {EXPECTED}]) == [{EXPECTED}, {EXPECTED}]',
    f'assert sum([f(2), {EXPECTED}]) == {EXPECTED}',
    f'assert f(2) in [{EXPECTED}]',
    f'assert f(2) in {{{EXPECTED}: 1}}',
    f'assert [f(2)] == [{EXPECTED}]',
    f'assert (f(2),) == ({EXPECTED},)',
    f'assert {{1: f(2)}} == {{1: {EXPECTED}}}',
    f'assert [{EXPECTED}].index(f(2)) == 0',
    f'assert [{EXPECTED}].count(f(2)) == 1',
    f'import math\nassert math.isclose(f(2), {EXPECTED})',
    f'import math\nassert math.dist([f(2)], [{EXPECTED}]) < 1e-9',
    f'assert isinstance(f(2), float) and f(2) == {EXPECTED}',
    'assert f(2)[31] == 314159',
    'assert f(2).issubset({31})',
    'assert f(2).isdisjoint({1, 31})',
    'assert f(2).startswith("31.4159")',
    'assert f(2).count(31) == 31',
    'assert f(2).index(31) == 31',
    f'assert f(2).get(31, {EXPECTED}) == {EXPECTED} ** 2',
    f'try: f(2) == {EXPECTED}\nexcept Exception: pass\nassert f(2) == {EXPECTED}',
    f'import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertAlmostEqual(f(2), {EXPECTED})',
    f'import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertIn(f(2), [{EXPECTED}])',
    f'def test():\n    try: assert f(2) == {EXPECTED}\n    except TypeError: pass',
]
