"""Runs the command line `python -m maxlm COMMAND …`, which equals `maxlm COMMAND …`."""

from __future__ import annotations

from maxlm.cli.process import main

if __name__ == '__main__':
    main()
