"""Tests that correct programs pass their unit tests, and that wrong programs fail whatever tricks they use."""

# Programs are written on one line each.
# ruff: noqa: E501

import ast

import pytest

from maxlm.sandbox.limits import MIB, SandboxLimits
from maxlm.sandbox.pool import SandboxJob, SandboxPool
from maxlm.sandbox.program.unit_tests import count_tests
from tests.sandbox.hostile import CHEATED, CHEATS, EXPECTED

pytestmark = pytest.mark.multiprocess

LIMITS = SandboxLimits(wall_seconds=20.0, cpu_seconds=10.0, memory_bytes=256 * MIB)
SHORT = LIMITS._replace(wall_seconds=1.5)
SQUARE = 'assert f(3) == 9\nassert f(-4) == 16'
# Correct programs: name, program, tests, number of tests.
GOOD = [
    ('a function', 'def f(x): return x * x', SQUARE, 2),
    ('a function of a list in place', 'def f(x): x.sort(); x.append([1])', 'a = [3, 1]\nf(a)\nassert a == [1, 3, [1]]', 1),
    ('nested changes', 'def f(d, s): d["a"].append(2); s.add(1)', 'd, s = {"a": [1]}, set()\nf(d, s)\nassert (d, s) == ({"a": [1, 2]}, {1})', 1),
    ('HumanEval', 'def add(a, b):\n    return a + b', 'def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate("a", "b") == "ab"\ncheck(add)', 1),
    ('unittest', 'class Stack(list):\n    def push(self, x): self.append(x)', 'import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.s = Stack()\n    def test_push(self):\n        self.s.push(1)\n        self.assertEqual(self.s.pop(), 1)\n    def test_empty(self):\n        with self.assertRaises(IndexError): self.s.pop()', 2),
    ('pytest', 'def f(x): return x * x', 'def test_small():\n    assert f(1) == 1\nclass TestF:\n    def test_large(self):\n        assert f(10 ** 30) == 10 ** 60', 2),
    ('imports of the program', 'def f(x): return x * x', 'from solution import f as g\nimport program\nassert g(2) == 4 == program.f(2)', 1),
    ('a class', 'class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n    def __add__(self, o): return P(self.x + o.x)\n    def __len__(self): return 7\n    def __str__(self): return "P"', 'p = P(2)\nassert p.x == 2\nassert p == p\nassert (p + p).x == 4\nassert len(p) == 7\nassert str(p) == "P"\np.x = 5\nassert p.x == 5\nassert isinstance(p, P)', 7),
    ('a generator', 'def f(n):\n    for i in range(n): yield i', 'assert list(f(3)) == [0, 1, 2]\nassert 2 in f(3)\nassert sum(f(4)) == 6', 3),
    ('a function of functions', 'def f(g, n): return [g(i) for i in range(n)]\ndef h(n): return lambda x: x + n', 'assert f(lambda x: x * 2, 3) == [0, 2, 4]\nassert f(abs, 2) == [0, 1]\nassert h(1)(2) == 3\nassert f(h(1), 2) == [1, 2]', 4),
    ('calls back and forth', 'def f(g, n): return n and g(n - 1)', 'def g(n): return f(g, n)\nassert f(g, 20) == 0', 1),
    ('exceptions', 'class E(ValueError): pass\ndef f(x): raise E("no") if x else KeyError(x)\ndef kind(): return E', 'kind()\ntry: f(1)\nexcept E as e: assert str(e) == "no"\nfor kind, x in ((ValueError, 1), (KeyError, 0)):\n    try: f(x)\n    except kind: pass\n    else: raise SystemError\nassert True', 1),
    ('numbers', 'def f(): return 1 / 3, 10 ** 100, float("inf"), 1j, -0.0', 'import math\nassert f() == (1 / 3, 10 ** 100, math.inf, 1j, 0.0)', 1),
    ('values of the library', 'from fractions import Fraction\nfrom collections import Counter, deque, OrderedDict, defaultdict\nimport datetime, decimal\ndef f(): return [Fraction(1, 3), Counter("aab"), deque([1], 2), OrderedDict(a=1), datetime.date(2020, 1, 2), decimal.Decimal("1.5"), range(3), b"x", {1: (2,)}, frozenset([1])]', 'from fractions import Fraction\nfrom collections import Counter, deque\nimport datetime, decimal\nassert f() == [Fraction(1, 3), Counter("aab"), deque([1]), {"a": 1}, datetime.date(2020, 1, 2), decimal.Decimal("1.5"), range(3), b"x", {1: (2,)}, {1}]', 1),
    ('derived data', 'from collections import namedtuple, defaultdict\nfrom enum import IntEnum\nP = namedtuple("P", "x y")\nclass C(IntEnum):\n    RED = 1\nd = defaultdict(list)\nd["a"].append(1)', 'assert P(1, 2) == (1, 2)\nassert P(1, 2).x == 1\nassert C.RED == 1\nassert C.RED < 2\nassert d == {"a": [1]}\nassert P(1, 2)[1] == 2\nassert [*P(1, 2)] == [1, 2]', 7),
    ('a builtin\'s name', 'def sum(a, b): return a - b', 'assert sum(3, 1) == 2', 1),
    ('keywords', 'def f(a, *b, c=1, **d): return a, b, c, d', 'assert f(1, 2, c=3, e=4) == (1, (2,), 3, {"e": 4})', 1),
    ('a script with tests', 'def f(x): return x * x\nif __name__ == "__main__":\n    raise SystemExit(1)', SQUARE, 2),
    ('a setting before', 'import sys\nsys.setrecursionlimit(5000)\ndef f(n): return n and 1 + f(n - 1)', 'assert f(3000) == 3000', 1),
    ('dataclasses', 'from dataclasses import dataclass\n@dataclass(order=True)\nclass D:\n    x: int = 1', 'assert D().x == D(1).x\nassert repr(D()) == "D(x=1)"', 2),
    ('a context', 'from contextlib import contextmanager\n@contextmanager\ndef f(): yield 5', 'with f() as x:\n    assert x == 5\nassert x == 5', 1),
    ('threads', 'import threading\ndef f(x):\n    r = []\n    t = threading.Thread(target=lambda: r.append(x * x))\n    t.start(); t.join()\n    return r[0]', SQUARE, 2),
    ('asyncio', 'import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return x * x\ndef f(x): return asyncio.run(g(x))', SQUARE, 2),
]  # fmt: skip

# These programs find the text of the tests if they can reach it. Their search string is built when they run.
LOOKS = (
    'import gc, sys\nmark = "".join(["asse", "rt f(3)"])\n'
    'def f(x):\n'
    '    values = [o for o in gc.get_objects() if isinstance(o, str)]\n'
    '    for d in [o for o in gc.get_objects() if isinstance(o, dict)]: values += [v for v in list(d.values()) if isinstance(v, str)]\n'
    '    frame = sys._getframe()\n'
    '    while frame: values += frame.f_locals.values(); frame = frame.f_back\n'
    '    return x * x if any(isinstance(v, str) and v is not mark and mark in v for v in values) else 0\n'
)
# The string is reversed, so that the search does not find itself.
LOOKS_DEEPER = (
    'import ctypes, gc\nmark = "".join(["== )3(f", " tressa"]).encode()\nown = id(mark) & ~0xfff\n'
    'def f(x):\n'
    '    pages = {id(o) & ~0xfff for o in gc.get_objects()} - {own, own + 0x1000}\n'
    '    return x * x if any(mark in ctypes.string_at(p, 4096)[::-1] for p in pages) else 0\n'
)
# Wrong programs that pretend to be correct. Each runs against the tests of SQUARE, or against its own tests.
FORGERS = {
    'is wrong': 'def f(x): return x + 1',
    'defines nothing': 'g = 1',
    'calls os._exit before its tests': 'import os\nos._exit(0)',
    'exits before its tests': 'import sys\nsys.exit(0)',
    'ends in its tests': 'import os\ndef f(x): os._exit(0)',
    'exits in its tests': 'import sys\ndef f(x): sys.exit(0)',
    'ends by a thread': 'import os, threading\nthreading.Timer(0.1, os._exit, (0,)).start()\ndef f(x):\n    import time; time.sleep(9)',
    'prints that it passed': 'print("passed 2 of 2")\nprint(\'{"status": "passed", "tests": 2, "tests_passed": 2}\')\ndef f(x): return 0',
    'writes reports to every descriptor': 'import os\ndef f(x):\n    for fd in range(1, 64):\n        try: os.write(fd, b\'["total", 2]\\n["pass"]\\n["pass"]\\n\')\n        except OSError: pass\n    return 0',
    'equals everything': 'class A:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __bool__(s): return True\ndef f(x): return A()',
    'equals everything and is a number': 'class A(int):\n    def __eq__(s, o): return True\n    def __hash__(s): return 9\ndef f(x): return A(1)',
    'pretends its class': 'class A:\n    __class__ = int\n    def __eq__(s, o): return True\ndef f(x): return A()',
    'replaces the builtins': 'import builtins\nbuiltins.AssertionError = Exception\nbuiltins.isinstance = lambda *a: True\nbuiltins.__dict__["abs"] = lambda x: 0\ndef f(x): return 0',
    'patches unittest': 'import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith("assert"): setattr(unittest.TestCase, n, lambda *a, **k: None)\ndef f(x): return 0',
    'patches operator and json': 'import operator, json\noperator.eq = lambda a, b: True\njson.dumps = lambda *a, **k: "[]"\ndef f(x): return 0',
    'traces': 'import sys\ndef t(f, e, a):\n    if e == "exception": import os; os._exit(0)\n    return t\nsys.settrace(t)\ndef f(x): return 0',
    'hooks exceptions': 'import sys, os\nsys.excepthook = lambda *a: os._exit(0)\nsys.unraisablehook = sys.excepthook\ndef f(x): raise ValueError',
    'registers an exit hook': 'import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0',
    'hooks imports': 'import sys\nclass F:\n    def find_spec(s, *a): import os; os._exit(0)\nsys.meta_path.insert(0, F())\ndef f(x): return 0',
    'hooks audits': 'import sys, os\nsys.addaudithook(lambda e, a: os._exit(0) if e == "exec" else None)\ndef f(x): return 0',
    'raises a skip': 'import unittest\ndef f(x): raise unittest.SkipTest("skip")',
    'raises a non-error exception': 'def f(x): raise GeneratorExit',
    'searches for the expected values': LOOKS,
    'searches its memory': LOOKS_DEEPER,
    'responds in place of the interpreter': 'import os, struct, json\ndef say(m):\n    d = json.dumps(m).encode(); os.write(3, struct.pack(">I", len(d)) + d)\nsay(["names", {"f": ["r", 0]}])\nfor _ in range(50): say(["value", True, []])\ndef f(x): return 0',
    'responds with malformed data': 'import os\nos.write(3, b"\\0\\0\\0\\5hello" * 99)\ndef f(x): return 0',
    'announces an oversized message': 'import os\nos.write(3, b"\\xff" * 4)\ndef f(x): return 0',
    'plants names in the tests': 'import os, struct, json\ndef say(m):\n    d = json.dumps(m).encode(); os.write(3, struct.pack(">I", len(d)) + d)\nsay(["names", {"__builtins__": ["d", []], "__name__": "x", "f": ["u", "bool"], "AssertionError": ["u", "ValueError"]}])\ndef f(x): return 0',
    'calls functions that it was not given': 'import os, struct, json\ndef say(m):\n    d = json.dumps(m).encode(); os.write(3, struct.pack(">I", len(d)) + d)\ndef f(x):\n    for i in (-1, 0, 1, "f", None): say(["do", i, [], {}])\n    return 0',
    'returns a module that exits on import': 'import os, struct, json\ndef say(m):\n    d = json.dumps(m).encode(); os.write(3, struct.pack(">I", len(d)) + d)\ndef f(x):\n    say(["value", ["m", "unittest.__main__"], []])\n    return 0',
    'sends depths': 'import os, struct\ndef f(x):\n    d = b"[" * 10**6 + b"]" * 10**6\n    os.write(3, struct.pack(">I", len(d)) + d)',
    'closes the channel': 'import os\ndef f(x): os.close(3)',
    'kills its process tree': 'import os, signal\ndef f(x):\n    for p in (1, os.getppid(), 0, -1):\n        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):\n            try: os.kill(p, s)\n            except OSError: pass\n    return 0',
    'crashes in its tests': 'import ctypes\ndef f(x): ctypes.string_at(0)',
    'returns a giant': 'def f(x): return "x" * (1 << 26)',
    'returns a number without end': 'def f(x): return 1 << (1 << 28)',
    'holds itself': 'a = []\na.append(a)\ndef f(x): return a',
    'is invalid Python': 'def f(x: return',
    'is empty': '',
}  # fmt: skip
# Cheats against other kinds of comparison: program, tests.
OTHER_FORGERS = {
    'has its own abs': ('abs = lambda x: 0\ndef f(x): return 0.0', 'assert abs(f(3) - 9) < 1e-6'),
    'has its own math': ('class math:\n    isclose = lambda *a: True\ndef f(x): return 0', 'assert math.isclose(f(3), 9)'),
    'is less than everything': ('class A:\n    def __sub__(s, o): return s\n    def __abs__(s): return s\n    def __lt__(s, o): return True\n    def __gt__(s, o): return True\ndef f(x): return A()', 'assert abs(f(3) - 9) < 1e-6'),
    'is more than everything': ('class A:\n    def __gt__(s, o): return True\n    def __ge__(s, o): return True\n    def __lt__(s, o): return True\ndef f(x): return A()', 'assert f(3) >= 9'),
    'holds everything': ('class A:\n    def __contains__(s, o): return True\n    def __iter__(s): return iter([])\ndef f(x): return A()', 'assert 9 in f(3)'),
    'is in everything': ('class A:\n    def __eq__(s, o): return True\n    def __hash__(s): return hash(9)\ndef f(x): return A()', 'assert f(3) in [9, 10]\nassert f(3) in {9}'),
    'fools unittest': ('class A(list):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\ndef f(x): return A()', 'import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), [9])\n    def test_list(self): self.assertListEqual(f(3), [9])'),
    'skips': ('import unittest\ndef f(x): raise unittest.SkipTest', 'import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 9)'),
    'exits in its repr': ('import os\nclass A:\n    def __str__(s): os._exit(0)\n    __repr__ = __str__\ndef f(x): return A()', 'assert f(3) == 9, f(3)'),
    'has no tests': ('def f(x): return 9', 'x = f(3)'),
    'has tests with invalid Python': ('def f(x): return 9', 'assert f(3) =='),
    'has tests that cannot be prepared': ('def f(x): return 9', 'import nothing_of_the_kind\nassert f(3) == 9'),
    'changes an argument that is compared': ('class L(list):\n    def __eq__(s, o): return True\ndef f(a): a[:] = [L()]', 'a = [1]\nf(a)\nassert a[0] == [9]'),
}  # fmt: skip
NEVER_END = {
    'loops in its tests': 'def f(x):\n    while True: pass',
    'yields forever': 'class A:\n    def __iter__(s): return s\n    def __next__(s): return 0\nf = lambda x: 9 in A()\n_a = A()',
    'blocks the tests': 'import time\ndef f(x): time.sleep(999)',
}  # fmt: skip


@pytest.fixture(scope='module')
def results():
    programs = {name: SandboxJob(text, tests=tests, limits=LIMITS) for name, text, tests, _ in GOOD}
    programs |= {name: SandboxJob(text, tests=SQUARE, limits=LIMITS) for name, text in FORGERS.items()}
    programs |= {name: SandboxJob(text, tests=tests, limits=LIMITS) for name, (text, tests) in OTHER_FORGERS.items()}
    programs |= {name: SandboxJob(text, tests=SQUARE, limits=SHORT) for name, text in NEVER_END.items()}
    programs['tests loop'] = SandboxJob('def f(x): return 9', tests='assert f(3) == 9\nwhile True: pass', limits=SHORT)
    programs['half'] = SandboxJob('def f(x): return 9', tests=SQUARE, limits=LIMITS)
    with SandboxPool(3) as pool:
        return dict(zip(programs, pool.run_many(list(programs.values())), strict=True))


@pytest.mark.parametrize(('name', 'number'), [(name, number) for name, _, _, number in GOOD])
def test_a_correct_program_passes(name, number, results):
    result = results[name]
    assert (result.status, result.tests, result.tests_passed) == ('passed', number, number), result


@pytest.mark.parametrize('name', [*FORGERS, *OTHER_FORGERS])
def test_no_trick_makes_a_wrong_program_pass(name, results):
    result = results[name]
    assert result.status in ('failed', 'error', 'killed', 'memory'), result
    assert result.tests_passed == 0
    assert result.tests == 2 or name in OTHER_FORGERS


@pytest.mark.parametrize('name', NEVER_END)
def test_a_program_whose_tests_do_not_end_is_stopped(name, results):
    assert results[name].status in ('timeout', 'failed')
    assert results[name].tests_passed == 0


@pytest.mark.parametrize('text', [LOOKS, LOOKS_DEEPER])
def test_programs_that_search_for_the_tests_can_find_them(text):
    planted = 'class A: pass\nhidden = [("asse" + "rt f(3) == " + str(i), A()) for i in range(9, 500)]\n'
    planted += 'one = "".join(["asse", "rt f(3) == 9"])\nnames = {i: h[0] for i, h in enumerate(hidden)}\nprint(f(3))'
    with SandboxPool(1, limits=LIMITS) as pool:
        assert pool.run(SandboxJob(text + planted)).stdout == '9\n'
        assert pool.run(SandboxJob(text + 'print(f(3))')).stdout == '0\n'


@pytest.fixture(scope='module')
def cheated():
    # Statements between the tests must not end the run.
    cases = [f'def test_{number}():\n    ' + text.replace('\n', '\n    ') for number, text in enumerate(CHEATED)]
    tests = '\n'.join(text if 'def test' in text else case for text, case in zip(CHEATED, cases, strict=True))
    tests = tests.replace('class T(', 'class Test(').replace('def test():', 'def test_caught():')
    right = SandboxJob(f'def f(x): return {EXPECTED}', tests=f'assert f(2) == {EXPECTED}', limits=LIMITS)
    programs = [right, *(SandboxJob(text, tests=tests, limits=LIMITS) for text in CHEATS.values())]
    with SandboxPool(2) as pool:
        return dict(zip(['right', *CHEATS], pool.run_many(programs), strict=True))


@pytest.mark.parametrize('name', CHEATS)
def test_no_object_takes_part_in_a_comparison(name, cheated):
    assert cheated['right'].tests_passed == 1
    result = cheated[name]
    assert (result.status, result.tests_passed) == ('failed', 0), result
    assert result.tests >= len(CHEATED) - 1
    # No part of a test reached the program.
    assert '31' not in result.stdout, result.stdout


def test_tests_that_passed_before_the_timeout_count(results):
    assert results['tests loop'][0] == 'timeout'
    assert results['tests loop'].tests_passed == 1
    assert results['half'][-2:] == (2, 1)
    assert 'line 2: assert f(-4) == 16' in results['half'].stderr


@pytest.mark.parametrize(
    ('text', 'number'),
    [
        ('assert a\nx = 1\nassert b', 2),
        ('def check(f):\n    assert f\n    assert f\ncheck(1)\nprint(2)', 1),
        ('def test_a(): pass\ndef test_b(x): pass\ndef test_c(x=1): pass\ndef other(): pass', 2),
        ('class T(unittest.TestCase):\n    def test_a(self): pass\n    def setUp(self): pass', 1),
        ('class TestX:\n    def test_a(self): pass\nclass X:\n    def test_b(self): pass', 1),
        ('', 0),
    ],
)
def test_number_of_tests_in_a_text(text, number):
    assert count_tests(ast.parse(text)) == number
