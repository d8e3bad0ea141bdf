"""Commands that install extras of maxlm."""

from __future__ import annotations

import shlex
from pathlib import Path

import maxlm

CHECKOUT = Path(maxlm.__file__).parent.parent


def pip_install(extra: str = '', *, upgrade: bool = False, checkout: Path = CHECKOUT) -> str:
    """Returns the command that installs maxlm with an extra into the active environment.

    Args:
        extra: name of the extra; '' = none.
        upgrade: also install newer versions.
        checkout: directory that contains the package. If it is a checkout, it is installed in place, as `pip install
            -e .` did: a package index knows nothing of it.
    """
    is_checkout = (checkout / 'pyproject.toml').is_file()
    what = (str(checkout) if is_checkout else 'maxlm') + (f'[{extra}]' if extra else '')
    return ' '.join(['pip install', *['--upgrade'] * upgrade, *['-e'] * is_checkout, shlex.quote(what)])
