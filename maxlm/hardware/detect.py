"""Detects the accelerators of a machine, even without JAX or a driver."""

from __future__ import annotations

import contextlib
import glob
from pathlib import Path
from typing import NamedTuple

from maxlm.hardware.nvml import Nvidia, NvidiaError, read_nvidia

PCI = Path('/sys/bus/pci/devices')
# https://pci-ids.ucw.cz: NVIDIA, Google. Display controllers have class 03 (0300 VGA, 0302 without a display).
NVIDIA_VENDOR, GOOGLE_VENDOR = 0x10DE, 0x1AE0
DISPLAY_CLASS = 0x03
# PCI device ids of Google's TPUs, v3 to 7x, from JAX's list. Other Google devices are disks and network cards.
TPU_IDS = frozenset({0x0027, 0x0056, 0x005E, 0x0062, 0x0063, 0x006F, 0x0076})


class Hardware(NamedTuple):
    """Accelerators of a machine.

    Attributes:
        nvidia_cards: number of NVIDIA GPUs on the PCI bus.
        tpu_chips: number of TPUs on the PCI bus, or else of TPU device files.
        nvidia: information from the NVIDIA driver; None if it is not available.
        problem: reason why NVML gives no information.
    """

    nvidia_cards: int = 0
    tpu_chips: int = 0
    nvidia: Nvidia | None = None
    problem: str = ''

    @property
    def num_gpus(self) -> int:
        """Number of NVIDIA GPUs reported by the driver, or else on the PCI bus."""
        return len(self.nvidia.gpus) if self.nvidia else self.nvidia_cards

    @property
    def platform(self) -> str:
        """Platform that JAX should use: gpu, tpu or cpu."""
        return 'gpu' if self.num_gpus else 'tpu' if self.tpu_chips else 'cpu'

    @property
    def description(self) -> str:
        """Description of the accelerators, e.g. `8 × NVIDIA H200`."""
        if self.nvidia and self.nvidia.gpus:
            kinds = dict.fromkeys(gpu.name for gpu in self.nvidia.gpus)
            return f'{len(self.nvidia.gpus)} × {" and ".join(kinds)}'
        if self.nvidia_cards:
            return f'{self.nvidia_cards} NVIDIA GPU{"s" * (self.nvidia_cards > 1)} on the PCI bus'
        return f'{self.tpu_chips} TPU chips' if self.tpu_chips else 'no GPU or TPU'


def read_hardware(pci: Path = PCI) -> Hardware:
    """Returns the accelerators of this machine."""
    cards, chips = _count(pci)
    chips = chips or len(glob.glob('/dev/accel[0-9]*'))
    try:
        return Hardware(cards, chips, read_nvidia())
    except NvidiaError as error:
        return Hardware(cards, chips, None, str(error))


def _count(pci: Path) -> tuple[int, int]:
    """Returns the numbers of NVIDIA GPUs and TPU chips on the PCI bus."""
    cards = chips = 0
    for device in pci.glob('*'):
        # Skip devices that cannot be read.
        with contextlib.suppress(OSError, ValueError):
            vendor, kind = _number(device / 'vendor'), _number(device / 'class') >> 16
            cards += vendor == NVIDIA_VENDOR and kind == DISPLAY_CLASS
            chips += vendor == GOOGLE_VENDOR and _number(device / 'device') in TPU_IDS
    return cards, chips


def _number(path: Path) -> int:
    return int(path.read_text().strip(), 16)
