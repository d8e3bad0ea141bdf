"""maxlm trains, evaluates and serves language models from raw text, with one config file.

The names of this module are the Python API; docs/python.md describes it. Their modules are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = '0.2.0'
# `python -m maxlm.train` and `python -m maxlm.COMMAND` find the modules of the commands.
__path__ += [f'{__path__[0]}/cli/{group}' for group in ('setup', 'runs', 'models')]
# Names of the Python API, and the modules that define them.
_EXPORTS = {
    'Config': 'maxlm.api.config',
    'Dataset': 'maxlm.api.dataset',
    'Environment': 'maxlm.rl.environments.protocol',
    'EnvironmentStep': 'maxlm.rl.environments.protocol',
    'Model': 'maxlm.api.model',
    'Plan': 'maxlm.api.plan',
    'Run': 'maxlm.api.run',
    'StateCallback': 'maxlm.trainer.callbacks',
    'Trainer': 'maxlm.api.trainer',
    'Trajectory': 'maxlm.rl.environments.protocol',
    'init_state': 'maxlm.training.state',
    'load': 'maxlm.api.model',
    'make_mesh': 'maxlm.api.mesh',
    'make_train_step': 'maxlm.training.step',
}
__all__ = [
    'Config',
    'Dataset',
    'Environment',
    'EnvironmentStep',
    'Model',
    'Plan',
    'Run',
    'StateCallback',
    'Trainer',
    'Trajectory',
    '__version__',
    'init_state',
    'load',
    'make_mesh',
    'make_train_step',
]

if TYPE_CHECKING:
    from maxlm.api.config import Config
    from maxlm.api.dataset import Dataset
    from maxlm.api.mesh import make_mesh
    from maxlm.api.model import Model, load
    from maxlm.api.plan import Plan
    from maxlm.api.run import Run
    from maxlm.api.trainer import Trainer
    from maxlm.rl.environments.protocol import Environment, EnvironmentStep, Trajectory
    from maxlm.trainer.callbacks import StateCallback
    from maxlm.training.state import init_state
    from maxlm.training.step import make_train_step


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
