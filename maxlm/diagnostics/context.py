"""Context of the checks: the machine and the run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property

from maxlm.config.schema import Config, TrainConfig
from maxlm.diagnostics.jax_subprocess import JaxStart, start_jax
from maxlm.hardware.detect import Hardware, read_hardware
from maxlm.storage.filesystem import is_url


class CheckContext:
    """The machine, and a run if one is given. Slow properties are computed on first use and cached."""

    def __init__(
        self,
        *,
        spec: str = '',
        overrides: Sequence[str] = (),
        config: Config | None = None,
        workdir: str = '',
        environment: Mapping[str, str] = os.environ,
        min_free_gib: float = 0.0,
        min_tokens_per_second: float = 0.0,
        try_resume: bool = False,
    ):
        """Stores the run and the environment.

        Args:
            spec: the config as given on the command line; '': none.
            overrides: overrides as `section.key=value`.
            config: unresolved config, as returned by `load`.
            workdir: directory or URL; '': none.
            environment: environment variables.
            min_free_gib: free disk space in GiB that the run needs.
            min_tokens_per_second: throughput that the run needs.
            try_resume: True if a restart from a checkpoint is tried.
        """
        self.spec = spec
        self.overrides = tuple(overrides)
        self.config = config
        self.workdir = workdir
        self.environment = environment
        self.min_free_gib = min_free_gib
        self.min_tokens_per_second = min_tokens_per_second
        self.try_resume = try_resume

    @cached_property
    def hardware(self) -> Hardware:
        return read_hardware()

    @cached_property
    def jax_start(self) -> JaxStart:
        """Returns the result of starting JAX in a subprocess."""
        return start_jax((self.config.train if self.config else TrainConfig()).compilation_cache_dir, self.environment)

    @property
    def buckets(self) -> tuple[str, ...]:
        """Returns the URLs that the run writes to."""
        paths = (self.workdir, self.config.checkpoint.remote_dir if self.config else '')
        return tuple(dict.fromkeys(path for path in paths if is_url(path)))

    @property
    def data_paths(self) -> tuple[str, ...]:
        """Returns the directories and URLs of the data sets that the run reads."""
        if self.config is None:
            return ()
        data = self.config.data
        return tuple(dict.fromkeys(entry.partition('#')[0] for entry, _ in data.sources)) or (data.path,)

    @property
    def num_processes(self) -> int:
        """Returns the number of processes of the run, as far as the environment defines it."""
        for name in ('MAXLM_NUM_PROCESSES', 'OMPI_COMM_WORLD_SIZE'):
            if self.environment.get(name, '').isdigit():
                return int(self.environment[name])
        if 'SLURM_STEP_NODELIST' in self.environment and self.environment.get('SLURM_NTASKS', '').isdigit():
            return int(self.environment['SLURM_NTASKS'])
        return 1

    @property
    def process(self) -> int:
        """Returns the index of this process."""
        if self.num_processes > 1:
            for name in ('MAXLM_PROCESS_ID', 'OMPI_COMM_WORLD_RANK', 'SLURM_PROCID'):
                if self.environment.get(name, '').isdigit():
                    return int(self.environment[name])
        return 0
