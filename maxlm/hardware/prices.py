"""Rental prices of devices and storage: public list prices of one date.

Prices vary: within one year, an H100 has cost from 2 to 12 dollars per hour, depending on the provider. The table is
meant for comparing plans. For actual costs, specify your own price.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from maxlm.errors import InputError, nearest

if TYPE_CHECKING:
    # The report reads prices without importing JAX.
    from maxlm.hardware.chips import Chip

# Date on which public price collections read the pages of the GPU providers (Lambda's B200 and V100: five days
# earlier). For TPUs see GOOGLE.
DATE = '2026-09-25'


class Price(NamedTuple):
    """Price of one device per hour in dollars without tax, and its source."""

    dollars: float
    source: str


class _Offer(NamedTuple):
    on_demand: float
    source: str
    # 0 = the provider has no spot market, or no public spot price with a date.
    spot: float = 0.0
    spot_source: str = ''


LAMBDA = f'Lambda, list price per GPU of an 8-GPU instance, as read {DATE}'
LAMBDA_SINGLE = f'Lambda, list price of a 1-GPU instance, as read {DATE}'
NEBIUS = f'Nebius, list price per GPU, HGX node, as read {DATE}'
RUNPOD = f'RunPod Secure Cloud, list price, as read {DATE}'
# Both are from Google's billing catalog in SkyPilot's catalog v8 (commit 006059e, without a date). Spot prices change
# up to once a day and differ between regions (v5p: from 0.84 to 1.68), so they are only an order of magnitude.
GOOGLE = 'Google Cloud, list price, {}, undated, as in the SkyPilot catalog v8, commit 006059e'
GOOGLE_SPOT = GOOGLE.replace('list', 'spot')


def _google(on_demand: float, spot: float, region: str) -> _Offer:
    return _Offer(on_demand, GOOGLE.format(region), spot, GOOGLE_SPOT.format(region))


# Keys are names of CHIPS. Prices are per JAX device: a v2 or v3 device is half a chip. If offers differ, the price of
# an 8-GPU node with fast links is used. GPU spot prices are omitted, because the published ones with a date are
# outdated or exceed the on-demand price of another provider.
PRICES: dict[str, _Offer] = {
    'h100': _Offer(3.99, LAMBDA),
    'h100-pcie': _Offer(3.29, LAMBDA_SINGLE),
    'h100-nvl': _Offer(3.19, RUNPOD),
    'h200': _Offer(4.50, NEBIUS),
    'b200': _Offer(6.69, LAMBDA),
    'gh200': _Offer(2.29, LAMBDA_SINGLE),
    'a100': _Offer(2.79, LAMBDA),
    'a100-40': _Offer(1.99, LAMBDA),
    'l40s': _Offer(1.09, RUNPOD),
    'v100': _Offer(0.79, LAMBDA),
    'rtx4090': _Offer(0.74, RUNPOD),
    'v2': _google(0.5625, 0.1688, 'us-central1'),
    'v3': _google(1.00, 0.255, 'us-central1'),
    'v4': _google(3.22, 0.9215, 'us-central2'),
    'v5e': _google(1.20, 0.2449, 'us-central1'),
    'v5p': _google(4.20, 0.8357, 'us-central1'),
    'v6e': _google(2.70, 0.5442, 'us-central1'),
}

# Dollars per GiB and month: Google Cloud Storage, standard class, us-central1 and other tier-1 regions.
STORAGE_PER_GIB_MONTH = 0.020
STORAGE_SOURCE = 'Google Cloud Storage, standard class, us-central1'


def storage_price(location: str) -> float | None:
    """Returns the dollars per GiB and month of a URL's storage; None if the price is unknown, as for a local disk."""
    return STORAGE_PER_GIB_MONTH if location.startswith('gs://') else None


def has_price(chip: Chip, *, spot: bool = False) -> bool:
    """Returns True if the table has a price for a chip."""
    if chip.platform == 'cpu':
        return not spot
    offer = PRICES.get(chip.name)
    return offer is not None and (not spot or offer.spot > 0)


def price_per_hour(chip: Chip, *, spot: bool = False) -> Price:
    """Returns the price of one device per hour.

    Raises:
        InputError: the table has no price for the chip.
    """
    if chip.platform == 'cpu' and not spot:
        return Price(0.0, 'local machine')
    offer = PRICES.get(chip.name)
    if offer is None:
        raise InputError(
            f'no price for {chip.name} in the price table of {DATE}; {nearest(chip.name, PRICES)}; set --price-per-hour'
        )
    if not spot:
        return Price(offer.on_demand, offer.source)
    if not offer.spot:
        priced = ', '.join(name for name, other in PRICES.items() if other.spot)
        raise InputError(
            f'no spot price for {chip.name} in the price table of {DATE}, only for {priced}; set --spot-price-per-hour'
        )
    return Price(offer.spot, offer.spot_source)
