"""Which accelerators are in a machine, whether or not JAX or a driver sees them."""

from __future__ import annotations

import contextlib
import glob
from pathlib import Path
from typing import NamedTuple

from maxlm.hardware.nvml import Nvidia, NvidiaError, read_nvidia

PCI = Path('/sys/bus/pci/devices')
# https://pci-ids.ucw.cz: NVIDIA, Google; display controllers have class 3 (03 VGA, 0302 without a display).
NVIDIA_VENDOR, GOOGLE_VENDOR = 0x10DE, 0x1AE0
DISPLAY_CLASS = 0x03
# Google's PCI devices that are TPUs, v3 to 7x, as in JAX's own list; others are disks and networks.
TPU_IDS = frozenset({0x0027, 0x0056, 0x005E, 0x0062, 0x0063, 0x006F, 0x0076})


class Hardware(NamedTuple):
    """The accelerators of a machine.

    Attributes:
        nvidia_cards: NVIDIA GPUs on the PCI bus.
        tpu_chips: TPUs on the PCI bus, or of which there is a device file.
        nvidia: what the driver tells; None without one.
        problem: reason why NVML gives no information.
    """

    nvidia_cards: int = 0
    tpu_chips: int = 0
    nvidia: Nvidia | None = None
    problem: str = ''

    @property
    def num_gpus(self) -> int:
        """NVIDIA GPUs: those that the driver tells of, or else those on the bus."""
        return len(self.nvidia.gpus) if self.nvidia else self.nvidia_cards

    @property
    def platform(self) -> str:
        """What JAX should run on here: gpu, tpu or cpu."""
        return 'gpu' if self.num_gpus else 'tpu' if self.tpu_chips else 'cpu'

    @property
    def told(self) -> str:
        """In words, e.g. `8 × NVIDIA H200`."""
        if self.nvidia and self.nvidia.gpus:
            kinds = dict.fromkeys(gpu.name for gpu in self.nvidia.gpus)
            return f'{len(self.nvidia.gpus)} × {" and ".join(kinds)}'
        if self.nvidia_cards:
            return f'{self.nvidia_cards} NVIDIA GPU{"s" * (self.nvidia_cards > 1)} on the PCI bus'
        return f'{self.tpu_chips} TPU chips' if self.tpu_chips else 'no GPU or TPU'


def read_hardware(pci: Path = PCI) -> Hardware:
    """What is in this machine."""
    cards, chips = _count(pci)
    chips = chips or len(glob.glob('/dev/accel[0-9]*'))
    try:
        return Hardware(cards, chips, read_nvidia())
    except NvidiaError as error:
        return Hardware(cards, chips, None, str(error))


def _count(pci: Path) -> tuple[int, int]:
    """NVIDIA GPUs and TPU chips on the bus."""
    cards = chips = 0
    for device in pci.glob('*'):
        # What cannot be read is not there.
        with contextlib.suppress(OSError, ValueError):
            vendor, kind = _number(device / 'vendor'), _number(device / 'class') >> 16
            cards += vendor == NVIDIA_VENDOR and kind == DISPLAY_CLASS
            chips += vendor == GOOGLE_VENDOR and _number(device / 'device') in TPU_IDS
    return cards, chips


def _number(path: Path) -> int:
    return int(path.read_text().strip(), 16)
