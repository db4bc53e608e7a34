"""Percentiles of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one kind of time, in seconds."""

    count: int
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        if not values:
            return cls(0, float("nan"), float("nan"), float("nan"))
        p50, p99 = np.percentile(np.asarray(values), [50, 99])
        return cls(len(values), float(p50), float(p99), float(max(values)))
