"""Config keys of distillation."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from maxlm.config.sections.declaration import CheckpointPath
from maxlm.config.sections.ranges import INT32, FractionAbove0, Range
from maxlm.storage.paths import Kind, PathOption


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    # Checkpoint of the teacher: WORKDIR (newest step), WORKDIR@STEP, WORKDIR@best or the directory of a step, also in a
    # bucket (gs://). Its size and architecture may differ from those of the run, but its tokenizer must be the same.
    # '' = no distillation.
    teacher: CheckpointPath = ''
    # Directory that maxlm distill wrote for data.path: the most likely tokens of a teacher, which then does not run in
    # the step. '' = none.
    logits_dir: Annotated[str, PathOption(Kind.DIRECTORY, may_be_empty=True)] = ''
    # Share of the distillation loss in the objective; the rest is the cross-entropy (Hinton et al. 2015, "Distilling
    # the Knowledge in a Neural Network").
    weight: FractionAbove0 = 0.5
    # Temperature by which the logits of teacher and student are divided. The loss is multiplied by its square.
    temperature: Annotated[float, Range(0.01, 1000)] = 1.0
    # Number of the teacher's most likely tokens that the loss distinguishes; all other tokens count as one. 0 = all.
    top_k: Annotated[int, Range(0, INT32)] = 0
