"""Tests colors: contrast on light and dark backgrounds, and distance for people with color vision deficiency."""

import itertools
import re
from typing import NamedTuple

import pytest

from maxlm.reporting.charts import NUM_COLORS
from maxlm.reporting.goodput import LABELS
from maxlm.reporting.page import ASSETS

THEMES = ('light', 'dark')
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISION = {
    'full': ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    'protan': ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    'deutan': ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    'tritan': ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


class Color(NamedTuple):
    """A color for the light and the dark page."""

    light: str
    dark: str


COLORS = {
    name: Color(*colors)
    for name, *colors in re.findall(
        r'^ *[-.]+([\w-]+)(?:: | { color: )light-dark\((#\w+), (#\w+)\)',
        (ASSETS / 'report.css').read_text(),
        re.MULTILINE,
    )
}
CURVES = [COLORS[f'c{number}'] for number in range(NUM_COLORS)]
TIME = {name.removeprefix('t-'): color for name, color in COLORS.items() if name.startswith('t-')}


def linear(color):
    values = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def dot(weights, values):
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def contrast(first, second):
    """Returns the contrast ratio of WCAG 2.1."""
    dark, light = sorted(dot((0.2126, 0.7152, 0.0722), linear(color)) for color in (first, second))
    return (light + 0.05) / (dark + 0.05)


def lab(rgb):
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1, 1.089)
    shares = [
        dot(row, [max(0, value) for value in rgb]) / white_value for row, white_value in zip(matrix, white, strict=True)
    ]
    x, y, z = (share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(first, second, vision):
    """Returns the CIE 1976 distance of two colors as seen with a color vision deficiency."""
    seen = [lab([dot(row, linear(color)) for row in VISION[vision]]) for color in (first, second)]
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


def closest(colors, theme):
    pairs = itertools.combinations([getattr(color, theme) for color in colors], 2)
    return min(distance(*pair, vision) for pair in pairs for vision in VISION)


@pytest.mark.parametrize('theme', THEMES)
def test_contrast(theme):
    background, panel = getattr(COLORS['background'], theme), getattr(COLORS['panel'], theme)
    for color in (COLORS[name] for name in ('text', 'muted', 'error', 'link')):
        assert contrast(getattr(color, theme), background) >= 4.5
        assert contrast(getattr(color, theme), panel) >= 4.5
    for color in CURVES:
        assert contrast(getattr(color, theme), background) >= 3
    assert contrast('#ffffff', '#000000') == pytest.approx(21)
    assert contrast('#56b4e9', '#ffffff') < 3


@pytest.mark.parametrize('theme', THEMES)
def test_curve_colors_are_distinguishable(theme):
    assert closest(CURVES, theme) > 18
    # Control: red and green of the same lightness are too close.
    assert closest([Color('#c05040', '#c05040'), Color('#777030', '#777030')], theme) < 12


@pytest.mark.parametrize('theme', THEMES)
def test_adjacent_bar_colors_are_distinguishable(theme):
    for first, second in itertools.pairwise(TIME.values()):
        assert closest([first, second], theme) > 9


def test_every_category_has_a_color_in_the_order_of_a_bar():
    assert list(TIME) == list(LABELS)
