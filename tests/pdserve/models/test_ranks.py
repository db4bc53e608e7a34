"""Several ranks, each a process with its part of the weights, answer as one process and as transformers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import ModelError
from pdserve.models.load import load_model, load_rank
from pdserve.parallel.gloo import RankLayout
from pdserve.parallel.group import Alone, ModelParallel
from tests.pdserve.models.passes import cache_for, choice, forward, greedy, prompt_of, reference_of
from tests.pdserve.models.tiny_families import make_tiny
from tests.pdserve.parallel.ranks import run_ranks

PROMPT, NEW = 43, 10
ANSWER = ("tests.pdserve.models.test_ranks", "answer")

CASES: dict[str, tuple[str, dict[str, Any], RankLayout]] = {
    "llama tp2": ("llama", {"kv_heads": 4, "intermediate": 100}, RankLayout(tp=2)),
    "qwen3 tp4": ("qwen3", {"num_key_value_heads": 4, "vocab_size": 303}, RankLayout(tp=4)),
    "qwen3 tp4, copied kv heads": ("qwen3", {}, RankLayout(tp=4)),
    "qwen3_moe tp2": ("qwen3_moe", {}, RankLayout(tp=2)),
    "qwen3_moe tp2 ep2": ("qwen3_moe", {}, RankLayout(tp=2, ep=True)),
    "qwen3_moe dp2 ep2": ("qwen3_moe", {}, RankLayout(dp=2, ep=True)),
    "deepseek tp2": ("deepseek", {}, RankLayout(tp=2)),
    "deepseek tp2 ep2": ("deepseek", {}, RankLayout(tp=2, ep=True)),
    "deepseek dp2 ep2": ("deepseek", {}, RankLayout(dp=2, ep=True)),
    "deepseek tp2 dp2 ep4": ("deepseek", {}, RankLayout(tp=2, dp=2, ep=True)),
}
IN_EVERY_RUN = {"qwen3 tp4, copied kv heads", "deepseek tp2 ep2", "deepseek dp2 ep2"}


def answer(parallel: ModelParallel, directory: Path, replicas: int) -> tuple[np.ndarray, list[int]]:
    """Prefill in two chunks, then decode. Replica d answers prompt d; what it has less to do, it steps empty."""
    model = load_rank(directory, "fp32", parallel)
    replica = parallel.ep.rank // parallel.tp.size if replicas > 1 else 0
    prompt, vocab = prompt_for(replica), model.config.vocab
    with cache_for(model, "fp32") as cache:
        first = forward(model, cache, [(prompt[:24], 0, 0)])
        if replica:
            forward(model, cache, [])  # this one's last chunk comes one step later
        last = forward(model, cache, [(prompt[24:], 24, 0)])
        if replicas > 1 and not replica:
            forward(model, cache, [])
        wanted = [3] if replica else []  # in the last layer, too, rows must reach the experts of a rank without any
        forward(model, cache, [(prompt[:8], 0, 16)], logits=wanted)
        logits, found = np.concatenate([first, last]), []
        for step in range(NEW):
            token = np.array([choice(model, last[-1]) if len(last) else 0])
            parallel.tp.broadcast(token)
            found.append(int(token[0]))
            last = forward(model, cache, [([found[-1]], len(prompt) + step, 0)])
    assert len(logits) == (len(prompt) if parallel.tp.rank == 0 else 0) and logits.shape[1] == vocab
    return logits, found


def prompt_for(replica: int) -> list[int]:
    return prompt_of(PROMPT + 8 * replica, seed=replica)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in CASES]
)
def test_ranks_agree_with_transformers_and_with_one_process(name: str, tmp_path: Path) -> None:
    family, changes, layout = CASES[name]
    directory = make_tiny(family, tmp_path / "model", seed=3, **changes)
    results, alone = run_ranks(layout, ANSWER, directory, layout.dp), load_model(directory, "fp32")
    for rank, (logits, tokens) in enumerate(results):
        prompt = prompt_for(rank // layout.tp)
        expected, continued = reference_of(directory, prompt, NEW)
        assert tokens == continued, rank
        if rank % layout.tp == 0:
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
            with cache_for(alone, "fp32") as cache:
                single = forward(alone, cache, [(prompt, 0, 0)])
                assert greedy(alone, cache, single[-1], len(prompt), NEW) == tokens
            if layout.tp == 1:
                assert np.array_equal(logits, single), "experts elsewhere do not change a bit"


class Pretended(Alone):
    """A rank of `size` that never speaks to the others: for what needs no sums."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_a_rank_maps_rows_and_copies_its_columns_only(tmp_path: Path) -> None:
    directory = make_tiny("qwen3", tmp_path / "model")
    whole = load_model(directory, "fp32")
    third = load_rank(directory, "fp32", ModelParallel(Pretended(3, 4)))
    theirs, ours = (model._layers[0].attention._weights for model in (whole, third))  # type: ignore[attr-defined]
    assert np.array_equal(ours.query, theirs.query[96:128]) and not ours.query.flags.owndata
    assert np.array_equal(ours.key, theirs.key[32:64]), "the second of two heads, which ranks 2 and 3 copy"
    assert np.array_equal(ours.output, theirs.output[:, 96:128]) and ours.output.base is None
    assert np.array_equal(third.ends.head, whole.ends.head[225:300])


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        ("qwen3", {}, 3, "has 4 heads, which 3 tensor-parallel ranks cannot share"),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 KV heads cannot be shared by 2 ranks"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(
    family: str, changes: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    directory = make_tiny(family, tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=message):
        load_rank(directory, "fp32", ModelParallel(Pretended(0, size)))
