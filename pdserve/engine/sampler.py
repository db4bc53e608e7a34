"""The next token from a row of logits. A row's token depends on that row, its parameters, seed and position alone."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from collections.abc import Sequence as ListLike

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.sequence import Sequence
from pdserve.types import SamplingParams

NO_TOKEN = -1
"""The logits held a NaN or an infinity: there is nothing to choose."""

_BLOCK = 256  # tokens that are summed up before the draw looks inside
_FLOORS = (0.1, 0.01, 1e-3, 1e-4, 1e-6, 0.0)  # weights relative to the likeliest token's


class Sampler:
    """Chooses tokens; holds nothing but a scratch row."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._padded: NDArray[np.float32] = np.zeros(-(-vocab // _BLOCK) * _BLOCK, dtype=np.float32)

    def sample(self, logits: NDArray[np.float32], sequences: ListLike[Sequence]) -> list[int]:
        """One token a sequence; NO_TOKEN if its row is unusable. `logits` `(sequences, vocab)` may be overwritten."""
        for index, sequence in enumerate(sequences):
            if sequence.known_tokens < sequence.stops_from and sequence.stop_ids:
                logits[index, list(sequence.stop_ids)] = -np.inf
        best = logits.argmax(axis=1)
        highest = logits[np.arange(len(best)), best]
        tokens: list[int] = best.tolist()
        for index, sequence in enumerate(sequences):
            if sequence.request.sampling.temperature > 0 and np.isfinite(highest[index]):
                draw = uniform(sequence.seed, sequence.known_tokens)
                tokens[index] = self._choose(logits[index], highest[index], sequence.request.sampling, draw)
        for index in np.flatnonzero(~np.isfinite(highest)).tolist():  # argmax finds a NaN before any number
            tokens[index] = NO_TOKEN
        return tokens

    def _choose(self, row: NDArray[np.float32], highest: np.float32, params: SamplingParams, draw: float) -> int:
        """Temperature, then min_p, top_k, top_p, each on what the one before has left; then the draw."""
        weights = self._padded[: self._vocab]
        np.subtract(row, highest, out=weights)
        if params.temperature != 1:
            # In double precision, so that a tiny temperature neither vanishes nor overflows.
            np.divide(weights, params.temperature, out=weights, casting="same_kind", dtype=np.float64)
        np.exp(weights, out=weights)  # the likeliest token's is 1
        if params.min_p > 0:
            weights *= weights >= min(params.min_p, 1.0)
        ids = _filter(weights, params)
        if ids is not None:
            return int(ids[_find(np.cumsum(weights[ids], dtype=np.float64), draw)])
        # All tokens, in order of id: first the block, then the token in it, which spares a sum over the whole row.
        sums = np.cumsum(self._padded.reshape(-1, _BLOCK).sum(axis=1), dtype=np.float64)
        block = _find(sums, draw)
        start = float(sums[block - 1]) if block else 0.0
        inside = np.cumsum(self._padded[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
        return block * _BLOCK + _find(inside, (draw * float(sums[-1]) - start) / float(inside[-1]))


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) for the token at `position`: a hash, so that no generator state exists to get out of step."""
    digest = hashlib.blake2b(struct.pack("<Qq", seed, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _find(cumulative: NDArray[np.float64], share: float) -> int:
    """Where `share` of the total falls; never a place of weight 0, whatever the rounding."""
    total = cumulative[-1]
    index = int(np.searchsorted(cumulative, share * total, side="right"))
    return index if index < len(cumulative) else int(np.searchsorted(cumulative, total, side="left"))


def _filter(weights: NDArray[np.float32], params: SamplingParams) -> NDArray[np.intp] | None:
    """Ids of the tokens that top_k and top_p leave, likeliest first (equals: lowest id first); None for all."""
    ids: NDArray[np.intp] | None = None
    if 0 < params.top_k < len(weights):
        ids = _likeliest(weights, lambda above: len(above) >= params.top_k)[: params.top_k]
    if params.top_p < 1:
        mass = params.top_p * float((weights if ids is None else weights[ids]).sum(dtype=np.float64))
        if ids is None:
            ids = _likeliest(weights, lambda above: above.sum(dtype=np.float64) >= mass)
        cumulative = np.cumsum(weights[ids], dtype=np.float64)
        ids = ids[: int(np.searchsorted(cumulative, mass, side="left")) + 1]
    return ids


def _likeliest(
    weights: NDArray[np.float32], enough: Callable[[NDArray[np.float32]], bool | np.bool_]
) -> NDArray[np.intp]:
    """Ids in order of falling weight, as far down as is `enough`: to sort the whole vocabulary takes milliseconds."""
    for floor in _FLOORS:
        ids = np.flatnonzero(weights >= floor)
        above = weights[ids]
        if enough(above):
            break
    return ids[np.argsort(-above, kind="stable")]
