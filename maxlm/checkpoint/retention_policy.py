"""Selects the steps of a run to delete, by the retention rules and by the size of all steps."""

from __future__ import annotations

from collections.abc import Iterable

from maxlm.formatting import format_bytes
from maxlm.log import logger
from maxlm.storage.filesystem import walk
from maxlm.training.retention import SavedStep, steps_to_delete
from maxlm.workdir.step_dirs import StepDirectory


class RetentionPolicy:
    """Retention policy of one directory of steps. Only one thread may use it.

    Attributes:
        max_bytes: maximum bytes of all steps; 0 = no limit.
    """

    def __init__(self, folder: StepDirectory, *, max_to_keep: int, keep_best: int, keep_period: int, max_bytes: int):
        """
        Args:
            folder: the directory.
            max_to_keep, keep_best, keep_period, max_bytes: see `steps_to_delete`.
        """
        self._folder = folder
        self._rules = {'max_to_keep': max_to_keep, 'keep_best': keep_best, 'keep_period': keep_period}
        self.max_bytes = max_bytes
        self._has_warned = False
        # Bytes of the steps of the last call. A new step can have the number of a deleted one.
        self._sizes: dict[int, int] = {}

    def steps_to_delete(self, saved: Iterable[SavedStep], *, before_save: bool = False) -> list[int]:
        """Returns the steps to delete, in the order in which to delete them.

        Args:
            saved: the complete steps.
            before_save: also make space for a new step of the size of the newest one.

        Raises:
            StorageError: the directory cannot be listed.
        """
        saved = sorted(saved)
        if self.max_bytes:
            self._sizes = {one.step: self._sizes.get(one.step) or self._size(one.step) for one in saved}
        sizes = self._sizes
        reserved = sizes.get(saved[-1].step, 0) if saved and before_save else 0
        deleted = steps_to_delete(saved, sizes, max_bytes=self.max_bytes, reserved=reserved, **self._rules)
        left = sum(size for step, size in sizes.items() if step not in deleted)
        if left > self.max_bytes and not before_save and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f'{self._folder.path}: checkpoints of {format_bytes(left)} exceed checkpoint.max_gib '
                f'({format_bytes(self.max_bytes)}), because permanent checkpoints (checkpoint.keep_period) and the '
                'newest one are not deleted'
            )
        return deleted

    def _size(self, step: int) -> int:
        return sum(entry.size for entry in walk(str(self._folder.path / str(step))))
