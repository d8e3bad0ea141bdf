"""Predicted memory, time and cost of a run on hardware that need not be present."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

from maxlm.api.config import to_config
from maxlm.checkpoint.frozen_models import with_frozen_models
from maxlm.config.resolve import needs_tokamax, resolve
from maxlm.config.schema import AUTO, Config
from maxlm.data.loader.dataset import open_training_data
from maxlm.errors import InputError
from maxlm.installation import pip_install
from maxlm.log import logger
from maxlm.planning.cost import DEFAULT_TERMS, Cost, PricingTerms
from maxlm.planning.forecast import Forecast, compile_ahead, estimate
from maxlm.planning.machine import machine_of, sized_config
from maxlm.planning.report import as_json, as_text, cost_of
from maxlm.planning.scaling import Data
from maxlm.planning.search import choose_micro_batch, search_layouts, verify_by_compiling
from maxlm.planning.targets import CompilerMissingError, Target, check_compiler, parse_target

# Compute capability of the first GPUs for which Mosaic does not compile kernels ahead of time (jaxlib 0.10.2).
BLACKWELL = (10, 0)
# Default if neither the config nor the data set defines a vocabulary: that of GPT-2.
USUAL_VOCABULARY = 50_257
# Length of a run in epochs whose data set does not exist.
ASSUMED_STEPS = 1000


class Plan:
    """Plan of a run on a target: whether it fits, and its speed and cost.

    The training step is compiled for the target if a compiler is installed. `maxlm plan --install-compiler` installs
    the compiler for NVIDIA GPUs.

    Examples:
        >>> import maxlm
        >>> plan = maxlm.Plan('1b', 'h100:8', estimate=True)
        >>> plan.fits, plan.why_estimated
        (True, 'estimate=True')

    Attributes:
        target: devices of the run.
        why_estimated: reason why the figures are estimates; '' if the step was compiled.
        machine: devices with their usable memory and speed.
        forecast: memory, work and time of a step.
        changes: config keys that `search` changed, with their values.
    """

    def __init__(
        self,
        config: str | Config,
        target: str,
        *,
        estimate: bool = False,
        vocab_size: int = 0,
        terms: PricingTerms = DEFAULT_TERMS,
    ):
        """Plans a run.

        Args:
            config: a config, or the name of one; see `Config.get`.
            target: name of the target: `h100:8`, `h100:8x4` (four nodes), `v5p:2x2x2` (a slice), `cpu`.
            estimate: estimate by formulas without compilation, in milliseconds.
            vocab_size: size of the vocabulary if the config does not set it; 0 = that of the data set.
            terms: prices and assumptions about the rental.

        Raises:
            InputError: the config or the target is not usable.
        """
        self._config, self._terms = with_frozen_models(to_config(config), is_planned=True), terms
        self.target: Target = parse_target(target)
        self._data = planned_data(self._config, vocab_size)
        self.why_estimated = why_estimated(self._config, self.target, estimate=estimate)
        self.machine = machine_of(self.target, sized_config(self._config, self._resolve))
        if self._config.train.per_device_batch_size == AUTO:
            self._config = choose_micro_batch(self._config, self.machine, self._resolve, self._forecast)
        self.forecast = self._forecast(self._resolve(self._config))
        self.changes: dict[str, Any] = {}

    @property
    def fits(self) -> bool:
        """True if the step fits the memory of each device."""
        return self.forecast.fits

    @property
    def memory_bytes(self) -> int:
        """Bytes that the step needs on each device."""
        return self.forecast.needed

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.forecast.time.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.forecast.tokens_per_second

    @property
    def mfu(self) -> float:
        """Fraction of the peak FLOP/s of the devices, with causal attention counted."""
        return self.forecast.mfu[0]

    @property
    def cost(self) -> Cost:
        """Hours and dollars of the complete run, and of its checkpoints."""
        return cost_of(self.forecast, self._terms)

    def search(self) -> Plan | None:
        """Returns the plan of the fastest layout that fits; None if none of the tried layouts fits.

        Its `changes` are the keys to set: `config.replace(plan.search().changes)`.
        """
        best = verify_by_compiling(search_layouts(self._config, self.machine, self._resolve), self._forecast)
        if best is None:
            return None
        found = copy.copy(self)
        found.forecast, found.changes = best.forecast, {change.key: change.value for change in best.changes}
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures as values for JSON, in bytes, seconds and dollars."""
        return {**as_json(self.forecast, self.cost, None), 'why_estimated': self.why_estimated or None}

    def __str__(self) -> str:
        return as_text(self.forecast, self.cost)

    def _resolve(self, config: Config) -> Config:
        chip = self.target.chip
        return resolve(
            config,
            platform=chip.platform,
            num_devices=self.target.num_devices,
            capability=chip.capability,
            **self._data._asdict(),
        )

    def _forecast(self, config: Config) -> Forecast:
        return (estimate if self.why_estimated else compile_ahead)(config, machine=self.machine)


def why_estimated(config: Config, target: Target, *, estimate: bool) -> str:
    """Returns the reason why only an estimate is possible; '' if the step can be compiled for the target."""
    if estimate:
        return 'estimate=True'
    try:
        check_compiler(target)
    except CompilerMissingError as error:
        return str(error)
    chip = target.chip
    if needs_tokamax(config.model, chip.platform):
        if find_spec('tokamax') is None:
            return f'the kernels of experts for GPUs need the package tokamax; run {pip_install("experts")}'
        if chip.capability and chip.capability >= BLACKWELL:
            return f'the kernels of experts for {chip.name} compile only on the GPU itself'
    return ''


def planned_data(config: Config, vocab_size: int) -> Data:
    """Returns the values that a config takes from its data set, with defaults if the data set does not exist."""
    vocabulary = vocab_size or config.model.vocab_size
    # Packed rows are counted, because they may not contain all tokens.
    if vocabulary and not config.train.num_epochs and config.data.rows == 'stream':
        return Data(vocabulary, windows=1)
    try:
        corpus = open_training_data(config.data, with_sources=False)
    except InputError as error:
        windows = 1
        if config.train.num_epochs:
            windows = _windows_of_steps(config)
            logger.warning(
                f'train.num_epochs={config.train.num_epochs:g}: {error}; assuming data for {ASSUMED_STEPS:,} steps'
            )
        if vocabulary:
            return Data(vocabulary, windows)
        logger.warning(f'the data set cannot be read; assuming a vocabulary of {USUAL_VOCABULARY} ids (--vocab-size)')
        return Data(USUAL_VOCABULARY, windows)
    for line in filter(None, (source.row_summary(config.data) for source in corpus.sources)):
        logger.info(line)
    if corpus.training_windows is None and config.train.num_epochs:
        raise InputError(
            f'train.num_epochs={config.train.num_epochs:g}: the data is still being prepared; set train.num_steps or '
            'train.num_tokens'
        )
    return Data(vocab_size or corpus.first.vocab_size, corpus.training_windows or 1)


def _windows_of_steps(config: Config) -> int:
    """Returns the number of windows for which the epochs of a config are `ASSUMED_STEPS` steps."""
    train = config.train
    rows = train.global_batch_size or train.global_batch_size_tokens // config.data.seq_len
    return max(1, round(ASSUMED_STEPS * rows / train.num_epochs))
