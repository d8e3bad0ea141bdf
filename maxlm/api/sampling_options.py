"""Types of the sampling settings that the methods of a model take as keyword arguments."""

from __future__ import annotations

from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """Sampling settings; their meanings and defaults are those of `maxlm.inference.sampling.Sampling`.

    Type checkers and editors read them here, because they cannot derive keyword arguments from a dataclass.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
