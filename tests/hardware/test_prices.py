"""Tests that the price table is complete and dated, and marks missing prices."""

import datetime

import pytest

from maxlm.errors import InputError
from maxlm.hardware.chips import CHIPS, Chip
from maxlm.hardware.prices import DATE, PRICES, STORAGE_PER_GIB_MONTH, has_price, price_per_hour

BY_NAME = {chip.name: chip for chip in CHIPS}
CPU = Chip('cpu', 'cpu', 'cpu', 1.0, 2**30, 1e10, 1, 1e9, 1e9, 1e9)


def test_every_row_is_a_chip_with_a_price_and_a_source():
    assert set(PRICES) <= set(BY_NAME)
    for name, offer in PRICES.items():
        assert 0.1 < offer.on_demand < 20, name
        assert offer.source, name
        assert bool(offer.spot) == bool(offer.spot_source), name
        assert offer.spot < offer.on_demand, name
    assert 0 < STORAGE_PER_GIB_MONTH < 1


def test_date_is_valid():
    assert datetime.date.fromisoformat(DATE) > datetime.date(2026, 1, 1)


@pytest.mark.parametrize('name', ['h100', 'h200', 'a100', 'b200', 'v4', 'v5e', 'v5p', 'v6e'])
def test_commonly_rented_chips_have_prices(name):
    price = price_per_hour(BY_NAME[name])
    assert price.dollars == PRICES[name].on_demand
    assert (DATE in price.source) == (BY_NAME[name].platform == 'gpu')
    assert ('undated' in price.source) == (BY_NAME[name].platform == 'tpu')
    assert has_price(BY_NAME[name])


def test_spot_prices():
    assert price_per_hour(BY_NAME['v5e'], spot=True).dollars < price_per_hour(BY_NAME['v5e']).dollars
    assert has_price(BY_NAME['v5e'], spot=True)
    assert not has_price(BY_NAME['h100'], spot=True)
    with pytest.raises(InputError, match=r'no spot price for h100 .*v5e.*; set --spot-price-per-hour'):
        price_per_hour(BY_NAME['h100'], spot=True)


def test_a_chip_without_a_price_is_named():
    assert not has_price(BY_NAME['v7x'])
    with pytest.raises(InputError, match=rf'no price for v7x in the price table of {DATE}.*set --price-per-hour'):
        price_per_hour(BY_NAME['v7x'])


def test_local_machine_costs_nothing():
    assert price_per_hour(CPU).dollars == 0
    assert has_price(CPU)
    assert not has_price(CPU, spot=True)
