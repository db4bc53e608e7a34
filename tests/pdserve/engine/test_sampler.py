from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.engine.sampler import NO_TOKEN, Sampler, uniform
from pdserve.engine.sequence import Sequence
from pdserve.types import GenerationRequest, RequestId, SamplingParams
from tests.pdserve.engine.toy import EOS, VOCAB, toy_config

CONFIG = toy_config()
sample = Sampler(VOCAB).sample


def sequence(known: int = 3, **sampling: object) -> Sequence:
    params = SamplingParams(max_tokens=50, **sampling)  # type: ignore[arg-type]
    request = GenerationRequest(RequestId("r"), (1, 2), params)
    return Sequence.start(request, CONFIG, 256, tuple(range(1, known - 1)))


def logits(seed: int, rows: int = 1, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * scale).astype(np.float32)


def draws(row: NDArray[np.float32], count: int, **sampling: object) -> NDArray[np.int64]:
    sequences = [sequence(seed=seed, **sampling) for seed in range(count)]
    return np.array(sample(np.repeat(row, count, axis=0), sequences))


def reference(row: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities after all filters, the slow and plain way."""
    scaled = row.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    if params.min_p > 0:
        weights[weights < params.min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0
    weights /= weights.sum()
    before = np.concatenate(([0.0], np.cumsum(weights[order])[:-1]))
    weights[order[1:][before[1:] >= params.top_p]] = 0  # the likeliest always stays
    return weights / weights.sum()


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.6, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 2.0, "top_p": 0.99, "top_k": 1000},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    row, count = logits(1, scale=2.0), 6000
    wanted = reference(row[0], SamplingParams(**filters))  # type: ignore[arg-type]
    seen = np.bincount(draws(row, count, **filters), minlength=VOCAB) / count
    assert not seen[wanted == 0].any(), "a token that the filters leave out was drawn"
    assert np.abs(seen - wanted).max() < 5 * np.sqrt(wanted.max() / count) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(FILTERS), st.integers(0, 2**64 - 1), st.integers(3, 40))
def test_a_token_depends_on_its_row_alone(rows: int, filters: dict[str, float], seed: int, known: int) -> None:
    matrix = logits(rows, 5)
    mine = sequence(known, seed=seed, **filters)
    others = [sequence(4, temperature=0), sequence(5), sequence(6, top_k=3), sequence(7, min_p=0.5)]
    alone = sample(matrix[2:3].copy(), [mine])[0]
    assert sample(matrix.copy(), [*others[:2], mine, *others[2:]])[2] == alone
    assert sample(matrix[[2, 0]].copy(), [mine, others[0]])[0] == alone


def test_the_seed_and_the_position_decide() -> None:
    row = logits(2, scale=0.1)
    assert len({sample(row.copy(), [sequence(known, seed=5)])[0] for known in range(3, 40)}) > 10
    assert len({sample(row.copy(), [sequence(3, seed=seed)])[0] for seed in range(40)}) > 10
    assert len({sample(row.copy(), [sequence(3)])[0] for _ in range(40)}) > 10, "without a seed, every request differs"
    assert sample(row.copy(), [sequence(3, seed=-1)]) == sample(row.copy(), [sequence(3, seed=2**64 - 1)])


def test_uniform_draws() -> None:
    values = np.array([uniform(seed, position) for seed in range(50) for position in range(100)])
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02 and len(set(values)) == len(values)
    assert uniform(3, 4) == uniform(3, 4) != uniform(4, 3)


def test_greedy_is_the_first_highest() -> None:
    row = np.zeros((1, VOCAB), dtype=np.float32)
    row[0, [7, 9]] = 2
    assert sample(row, [sequence(temperature=0)]) == [7]
    assert sample(row, [sequence(temperature=1e-30, seed=1, top_k=1)]) == [7]


def test_a_tiny_temperature_does_not_overflow() -> None:
    row = logits(3, scale=1e4)
    assert set(draws(row, 20, temperature=1e-6)) == {int(row.argmax())}


def test_min_tokens_bans_what_would_stop() -> None:
    row = np.zeros((1, VOCAB), dtype=np.float32)
    row[0, EOS], row[0, 5], row[0, 6] = 9, 8, 7
    banned = {"temperature": 0, "stop_token_ids": (5, VOCAB + 3), "min_tokens": 2}
    assert sample(row.copy(), [sequence(3, **banned)]) == [6]
    assert sample(row.copy(), [sequence(4, **banned)]) == [EOS]  # two tokens are there
    assert sample(row.copy(), [sequence(3, ignore_eos=True, **banned)]) == [EOS]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_no_token(broken: float, temperature: float) -> None:
    matrix = logits(4, 2)
    matrix[0, 11] = broken
    tokens = sample(matrix, [sequence(temperature=temperature), sequence(temperature=0)])
    assert tokens[0] == NO_TOKEN != tokens[1]


def test_a_large_vocabulary_draws_from_all_of_it() -> None:
    """More tokens than one block of the sum, the last one not full."""
    vocab = 5 * 256 + 100
    config = replace(CONFIG, vocab=vocab)
    request = GenerationRequest(RequestId("r"), (1, 2), SamplingParams(max_tokens=50, seed=1))
    row = np.full((1, vocab), -30, dtype=np.float32)
    wanted = {0: 0.25, 255: 0.25, 256: 0.125, 1300: 0.125, vocab - 1: 0.25}
    row[0, list(wanted)] = np.log(list(wanted.values()))
    sampler, count = Sampler(vocab), 4000
    sequences = [
        Sequence.start(replace(request, sampling=SamplingParams(seed=seed)), config, 256) for seed in range(count)
    ]
    tokens = sampler.sample(np.repeat(row, count, axis=0), sequences)
    seen = np.bincount(tokens, minlength=vocab) / count
    assert set(np.flatnonzero(seen)) == set(wanted)
    assert all(abs(seen[token] - share) < 0.04 for token, share in wanted.items())
