"""Describes devices of hardware that is absent, for programs that are only compiled."""

from maxlm.planning.targets import parse_target, target_devices


def tpu_devices(name):
    """Returns the chips of a TPU slice as `v4:2x2x4`, by the compiler alone."""
    return target_devices(parse_target(name))
