"""Tests the seccomp filter for both architectures with a BPF interpreter."""

import struct

import pytest

from maxlm.sandbox import seccomp, syscalls

NUMBERS = {'x86_64': 0, 'aarch64': 1}
ARCHITECTURE = {machine: code for machine, (_, code) in seccomp.ARCHITECTURES.items()}
ME, OTHER = 1000, 1001
# Jump offsets are one byte.
LONGEST_JUMP = 255


def run_filter(program, number, arguments=(), architecture=ARCHITECTURE['x86_64']):
    """Returns the kernel's decision, computed by an interpreter of packet-filter programs."""
    data = struct.pack('=IIQ6Q', number, architecture, 0, *(*arguments, *[0] * (6 - len(arguments))))
    place = value = 0
    while True:
        code, jump, otherwise, operand = program[place]
        place += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            (value,) = struct.unpack_from('=I', data, operand)
            continue
        holds = {seccomp.EQUAL: value == operand, seccomp.GREATER_EQUAL: value >= operand}
        holds[seccomp.ANY_BIT] = bool(value & operand)
        place += jump if holds[code] else otherwise


def allows(program, number, *arguments, machine='x86_64'):
    return run_filter(program, number, arguments, ARCHITECTURE[machine]) == seccomp.ALLOW


@pytest.mark.parametrize('machine', NUMBERS)
def test_the_filter_refuses_what_it_lists_and_no_more(machine):
    program = seccomp.filter_program(machine)
    column = NUMBERS[machine]
    refused = {numbers[column] for numbers in seccomp.REFUSED.values()} - {None}
    asked = {numbers[column] for numbers in (seccomp.CLONE, seccomp.PRCTL, seccomp.IOCTL, seccomp.SOCKETPAIR)}
    assert len(refused) == sum(numbers[column] is not None for numbers in seccomp.REFUSED.values())
    assert not refused & asked
    for number in set(range(seccomp.LAST_KNOWN + 1)) - asked:
        assert allows(program, number, machine=machine) is (number not in {*refused, 435}), number
    assert not allows(program, seccomp.LAST_KNOWN + 1, machine=machine)
    assert run_filter(program, 435, (), ARCHITECTURE[machine]) == seccomp.refuse(38)[3]
    other = ARCHITECTURE['aarch64' if machine == 'x86_64' else 'x86_64']
    assert run_filter(program, 0, (), other) == seccomp.KILL_PROCESS
    assert max(jump for _, *jumps, _ in program for jump in jumps) <= LONGEST_JUMP


@pytest.mark.parametrize('machine', NUMBERS)
def test_the_filter_reads_arguments(machine):
    column = NUMBERS[machine]
    program = seccomp.filter_program(machine)

    def allowed(numbers, *arguments, of=program):
        return allows(of, numbers[column], *arguments, machine=machine)

    assert allowed(seccomp.CLONE, 17)
    assert not any(allowed(seccomp.CLONE, 17 | 1 << bit) for bit in (17, 25, 26, 27, 28, 29, 30))
    assert allowed(seccomp.PRCTL, 38)
    assert not allowed(seccomp.PRCTL, syscalls.PR_SET_PDEATHSIG)
    assert allowed(seccomp.SOCKETPAIR, 1)
    assert not allowed(seccomp.SOCKETPAIR, 2)
    assert not allowed(seccomp.IOCTL, 0, 0x5412)
    for numbers in (*seccomp.BY_PID.values(), *seccomp.OTHER_SIGNAL_CALLS.values()):
        assert allowed(numbers, OTHER)
    alone = seccomp.filter_program(machine, own_pid=ME)
    for numbers in seccomp.BY_PID.values():
        assert allowed(numbers, ME, of=alone)
        assert allowed(numbers, 0, of=alone)
        assert not allowed(numbers, OTHER, of=alone)
        assert not allowed(numbers, (1 << 64) - 1, of=alone)
    assert not any(allowed(numbers, ME, of=alone) for numbers in seccomp.OTHER_SIGNAL_CALLS.values())
    assert not allowed(seccomp.FCNTL, 0, 8, of=alone)
    assert allowed(seccomp.FCNTL, 0, 1, of=alone)
    shown = seccomp.filter_program(machine, files_visible=True)
    by_path = [numbers for numbers in seccomp.BY_PATH.values() if numbers[column] is not None]
    assert all(allowed(numbers) for numbers in by_path)
    assert not any(allowed(numbers, of=shown) for numbers in by_path)


def test_another_architecture_has_no_filter():
    with pytest.raises(OSError, match='unsupported architecture riscv64'):
        seccomp.filter_program('riscv64')
