"""The choice of a provider for a pair of nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.choice import AUTO, RDMA_PROVIDERS, SLOW_FOR_GPUS, Reach, choose
from transport.errors import ProviderUnavailable

IP = ("tcp", "tcp;ofi_rxm", "sockets", "shm")
PROVIDERS = (*RDMA_PROVIDERS, *IP, "ucx")


def node(name="prefill-0", host="a", providers=IP, **more):
    return Reach(name, host, providers, **more)


def rdma(name, host, *nics, provider="verbs;ofi_rxm", **more):
    return Reach(name, host, (provider, *IP), (provider,), nics, **more)


@st.composite
def nodes(draw, name):
    providers = tuple(draw(st.lists(st.sampled_from(PROVIDERS), unique=True)))
    active = tuple(provider for provider in providers if provider in RDMA_PROVIDERS and draw(st.booleans()))
    nics = tuple(f"mlx5_{i}" for i in range(draw(st.integers(1, 3)))) if active else ()
    return Reach(name, draw(st.sampled_from("ab")), providers, active, nics, draw(st.booleans()))


def outcome(*arguments, **options):
    try:
        return choose(*arguments, **options).provider
    except ProviderUnavailable:
        return None


@given(st.sampled_from((AUTO, *PROVIDERS)), nodes("one"), nodes("two"), st.booleans())
def test_both_sides_come_to_the_same(configured, one, two, allow_tcp):
    assert outcome(configured, one, two, allow_tcp=allow_tcp) == outcome(configured, two, one, allow_tcp=allow_tcp)


@given(st.sampled_from((AUTO, *PROVIDERS)), nodes("one"), nodes("two"), st.booleans())
def test_what_is_chosen_opens_on_both_and_connects_them(configured, one, two, allow_tcp):
    provider = outcome(configured, one, two, allow_tcp=allow_tcp)
    if provider is None:
        return
    assert provider in one.providers and provider in two.providers
    assert configured in (AUTO, provider)
    assert provider != "shm" or one.host == two.host
    assert allow_tcp or provider not in SLOW_FOR_GPUS or not (one.gpus or two.gpus)


@given(nodes("one"), nodes("two"))
def test_automatic_choice_takes_the_first_rule_that_holds(one, two):
    common = set(one.providers) & set(two.providers)
    active = set(one.rdma) & set(two.rdma)
    rules = [
        ("efa", "efa" in active),
        ("verbs;ofi_rxm", "verbs;ofi_rxm" in active),
        ("shm", "shm" in common and one.host == two.host),
        ("tcp", "tcp" in common),
        ("ucx", "ucx" in common),
    ]
    assert outcome(AUTO, one, two, allow_tcp=True) == next((provider for provider, holds in rules if holds), None)


@given(st.sampled_from((AUTO, *PROVIDERS)), nodes("one"), nodes("two"), st.booleans())
def test_it_is_explained_in_one_line_either_way(configured, one, two, allow_tcp):
    try:
        choice = choose(configured, one, two, allow_tcp=allow_tcp)
    except ProviderUnavailable as error:
        text = str(error)
        assert "one" in text or "two" in text
    else:
        text = choice.reason
        assert text.startswith(f"{choice.provider}: ")
    assert "\n" not in text and len(text) < 400


def test_rdma_names_the_devices():
    both = rdma("p", "a", "mlx5_0", "mlx5_1"), rdma("d", "b", "mlx5_0", "mlx5_1")
    assert choose(AUTO, *both).reason == "verbs;ofi_rxm: both sides have an active RDMA device (mlx5_0, mlx5_1)"
    assert "(p: mlx5_0; d: mlx5_2)" in choose(AUTO, rdma("p", "a", "mlx5_0"), rdma("d", "b", "mlx5_2")).reason


@pytest.mark.parametrize(
    ("one", "two", "why"),
    [
        (node("p"), node("d", "b"), "tcp: on two hosts, without an active RDMA device at p and d"),
        (node("p"), rdma("d", "b", "mlx5_0"), "tcp: on two hosts, without an active RDMA device at p"),
        (
            rdma("p", "a", "rdmap0", provider="efa"), rdma("d", "b", "mlx5_0"),
            "tcp: on two hosts whose RDMA devices differ (efa; verbs;ofi_rxm)",
        ),
        (node("p"), node("d", providers=("tcp",)), "tcp: p and d share the host a, but not both have shm"),
        (node("p"), node("d"), "shm: p and d share the host a"),
        (node("p", providers=("ucx", "shm")), node("d", "b", providers=("ucx",)), "ucx: both sides have libucp"),
    ],
)  # fmt: skip
def test_reasons(one, two, why):
    assert choose(AUTO, one, two).reason.startswith(why)


def test_gpus_do_not_end_on_tcp_unless_allowed():
    pair = node("prefill-0", gpus=True), node("decode-0", "b", gpus=True)
    with pytest.raises(ProviderUnavailable, match=r"prefill-0 and decode-0 have GPUs.*tcp: on two.*allow_tcp"):
        choose(AUTO, *pair)
    assert choose(AUTO, *pair, allow_tcp=True).provider == "tcp"
    with pytest.raises(ProviderUnavailable, match="allow_tcp"):
        choose("sockets", *pair)
    assert (
        choose(AUTO, rdma("p", "a", "mlx5_0", gpus=True), rdma("d", "b", "mlx5_0", gpus=True)).provider[:5] == "verbs"
    )


def test_a_configured_provider_names_the_side_without_it():
    with pytest.raises(ProviderUnavailable, match="'efa' is configured, but decode-0 cannot open it; it has: tcp, "):
        choose("efa", rdma("prefill-0", "a", "rdmap0", provider="efa"), node("decode-0", "b"))
    with pytest.raises(ProviderUnavailable, match="decode-0 cannot open it; it has: none"):
        choose("tcp", node(), node("decode-0", providers=()))


def test_configured_shm_across_hosts():
    with pytest.raises(ProviderUnavailable, match="prefill-0 is on host a and decode-0 on b"):
        choose("shm", node(), node("decode-0", "b"))


def test_nothing_in_common_lists_both():
    with pytest.raises(ProviderUnavailable, match=r"prefill-0 has shm; decode-0 has shm$"):
        choose(AUTO, node(providers=("shm",)), node("decode-0", "b", providers=("shm",)))
