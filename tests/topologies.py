"""Device descriptions of absent hardware, for programs that are only compiled."""

from maxlm.planning.targets import parse_target, target_devices


def tpu_devices(name):
    """Returns the devices of a TPU slice such as `v4:2x2x4` from the compiler, without hardware."""
    return target_devices(parse_target(name))
