"""Tests the requested Landlock rules; `test_sandbox_hostile` tests that they are enforced."""

from maxlm.sandbox import landlock


def test_landlock_grants_no_program_and_no_device():
    assert landlock.RIGHT_BITS['read_file'] | landlock.RIGHT_BITS['read_dir'] == landlock.READ
    for name in ('execute', 'make_char', 'make_block', 'make_sock'):
        assert not landlock.WRITE & landlock.RIGHT_BITS[name]
    assert landlock.RIGHT_BITS['ioctl_dev'] == 1 << 15
