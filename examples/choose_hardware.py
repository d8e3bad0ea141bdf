"""Compares the estimated time and cost of a run on several kinds of hardware.

    python -m examples.choose_hardware 1b h100:8 h200:8 v5p:2x2x2

The figures are estimates by formulas; `maxlm plan` compiles the step for more exact ones.
"""

from __future__ import annotations

import argparse

import maxlm
from maxlm.errors import InputError


def main(argv: list[str] | None = None) -> list[maxlm.Plan]:
    """Prints a table of the targets, with the cheapest that fits first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='name or file of a config')
    parser.add_argument('targets', nargs='+', help='targets of maxlm plan')
    parser.add_argument('--vocab-size', type=int, default=0, help='vocabulary if the config does not set it')
    options = parser.parse_args(argv)

    plans = []
    for target in options.targets:
        try:
            plan = maxlm.Plan(options.config, target, estimate=True, vocab_size=options.vocab_size)
        except InputError as error:
            print(f'{target}: {error}')
            continue
        plans.append(plan if plan.fits else plan.search() or plan)
    plans.sort(key=lambda plan: (not plan.fits, plan.cost.dollars or float('inf')))
    print(f'{"target":<14}{"memory":>10}{"MFU":>7}{"hours":>9}{"dollars":>10}  changes')
    for plan in plans:
        dollars = f'{plan.cost.dollars:,.0f}' if plan.cost.dollars else '?'
        changes = ' '.join(f'{key}={value}' for key, value in plan.changes.items())
        note = changes if plan.fits else 'does not fit'
        memory = f'{plan.memory_bytes / 2**30:.1f} GiB'
        print(f'{plan.target.spec:<14}{memory:>10}{plan.mfu:>7.0%}{plan.cost.hours:>9.1f}{dollars:>10}  {note}')
    return plans


if __name__ == '__main__':
    main()
