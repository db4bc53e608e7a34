"""Which experts a row goes to, and how their results come together; row by row, in one order."""

from __future__ import annotations

import numpy as np

from pdserve.ops.api import Floats, Indices
from pdserve.ops.compile import inline, kernel


@inline
def take_largest(values, count, taken):  # type: ignore[no-untyped-def]
    """Places of the `count` largest values, descending; of equal ones the first. Leaves -inf where it took one."""
    for k in range(count):
        best = 0
        for i in range(1, len(values)):
            if values[i] > values[best]:
                best = i
        taken[k] = best
        values[best] = -np.inf


@inline
def scores_of(logits, sigmoid, scores):  # type: ignore[no-untyped-def]
    if sigmoid:
        for i in range(len(logits)):
            scores[i] = np.float32(1.0) / (np.float32(1.0) + np.exp(-logits[i]))
        return
    top = logits[0]
    for i in range(1, len(logits)):
        top = max(top, logits[i])
    total = np.float32(0.0)
    for i in range(len(logits)):
        scores[i] = np.exp(logits[i] - top)
        total += scores[i]
    for i in range(len(logits)):
        scores[i] /= total


@inline
def mask_groups(choice, groups, kept, taken):  # type: ignore[no-untyped-def]
    """Leaves the `kept` groups whose two best choices sum highest; the other groups become -inf."""
    width = len(choice) // groups
    totals = np.empty(groups, np.float32)
    for group in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for i in range(group * width, (group + 1) * width):
            if choice[i] > first:
                first, second = choice[i], first
            elif choice[i] > second:
                second = choice[i]
        totals[group] = first + second
    take_largest(totals, kept, taken)
    for group in range(groups):
        if totals[group] != -np.inf:
            choice[group * width : (group + 1) * width] = -np.inf


@kernel
def route(
    logits: Floats, bias: Floats, sigmoid: bool, groups: tuple[int, int], normalise: bool, scale: float,
    experts: Indices, weights: Floats,
) -> None:  # fmt: skip
    """See `Ops.route`: logits `(rows, experts)`; bias is empty where there is none; outputs `(rows, top_k)`."""
    count, top_k = logits.shape[1], experts.shape[1]
    scores, choice, taken = np.empty(count, np.float32), np.empty(count, np.float32), np.empty(count, np.int64)
    for row in range(logits.shape[0]):
        scores_of(logits[row], sigmoid, scores)
        for i in range(count):
            choice[i] = scores[i] + bias[i] if len(bias) else scores[i]
        if groups[1] < groups[0]:
            mask_groups(choice, groups[0], groups[1], taken)
        take_largest(choice, top_k, taken)
        total = np.float32(0.0)
        for k in range(top_k):
            total += scores[taken[k]]
        taken[:top_k].sort()
        factor = np.float32(scale) / (total + np.float32(1e-20)) if normalise else np.float32(scale)
        for k in range(top_k):
            experts[row, k] = taken[k]
            weights[row, k] = scores[taken[k]] * factor


@kernel
def combine(results: Floats, place: Indices, weights: Floats, out: Floats) -> None:
    """See `Ops.combine`: results `(places, hidden)`, place and weights `(rows, top_k)`, out `(rows, hidden)`."""
    for row in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[row, i] = 0.0
        for k in range(place.shape[1]):
            source, weight = place[row, k], weights[row, k]
            for i in range(out.shape[1]):
                out[row, i] += results[source, i] * weight
