"""Colors of the page for light and dark mode, distinguishable by everyone and readable on their background.

Based on Okabe and Ito 2008, "Color Universal Design", darkened for white and lightened for black.
"""

from __future__ import annotations

from typing import NamedTuple


class Color(NamedTuple):
    """A color for the light and the dark page."""

    light: str
    dark: str


BACKGROUND = Color('#ffffff', '#14171b')
# Background of tiles and code.
PANEL = Color('#f3f5f7', '#1e2329')
TEXT = Color('#1a1d21', '#e8eaed')
# Color of notes and labels.
MUTED = Color('#565d66', '#a9b1ba')
GRID = Color('#e1e5e9', '#2e353d')
ERROR = Color('#b3261e', '#ff8a80')
LINK = Color('#00589c', '#7cc4f5')

# Colors of curves, in order of use.
CURVES = (
    Color('#0072b2', '#56b4e9'),
    Color('#d55e00', '#e8743b'),
    Color('#08a967', '#26926a'),
    Color('#c178a1', '#b352a0'),
    Color('#645d26', '#fcd81c'),
    Color('#2f3134', '#d0dce7'),
)
# When all colors are used, they repeat with other dash patterns.
NUM_DASHES = 3

# Colors of time categories, in the order of a bar. Lost and idle time also have stripes.
TIME = {
    'step': Color('#0072b2', '#56b4e9'),
    'rollout': Color('#3d9bd4', '#1f78b4'),
    'evaluation': Color('#00805f', '#2bc4a0'),
    'checkpoint': Color('#a8487f', '#f0a6d2'),
    'data_wait': Color('#c79a00', '#f0e442'),
    'compile': Color('#33393f', '#d6dade'),
    'start': Color('#7d8791', '#8f99a3'),
    'restore': Color('#5e3c99', '#b8a5f2'),
    'other': Color('#a3acb5', '#5f6973'),
    'lost': Color('#d55e00', '#f0883e'),
    'idle': Color('#c9cfd5', '#3d454e'),
}


def variables() -> str:
    """Returns all colors as CSS variables; `color-scheme` selects the light or dark value."""
    named = {
        'background': BACKGROUND,
        'panel': PANEL,
        'text': TEXT,
        'muted': MUTED,
        'grid': GRID,
        'error': ERROR,
        'link': LINK,
        **{f'c{number}': color for number, color in enumerate(CURVES)},
        **{f't-{name}': color for name, color in TIME.items()},
    }
    return ' '.join(f'--{name}: light-dark({light}, {dark});' for name, (light, dark) in named.items())


def curve_class(number: int) -> str:
    """Returns the CSS classes of a curve with an index, from 0."""
    rounds, color = divmod(number, len(CURVES))
    return f'c{color} d{rounds % NUM_DASHES}'
