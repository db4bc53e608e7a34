"""Prefill on one host, decode on the other: the pages go over the network between them, and arrive as they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.config import load_settings
from pdserve.engine.local import generate, local_engine
from pdserve.models.load import load_model
from policies.sharding import pages_sent
from tests.hosts.client import LENGTHS, ROOT, Told, prompts
from tests.hosts.namespaces import Host
from tests.hosts.ray_hosts import ENVIRONMENT, ray_over
from tests.pdserve.models.tiny import make_tiny_llama

LAYERS, PAGE = 6, 16
ENGINE = {
    "engine.dtype": "fp32",
    "engine.page_size": PAGE,
    "engine.chunk_tokens": 64,
    "engine.kv_cache_tokens": 8192,
}
ASKING_S = 80


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its pages are large enough that what else crosses the veth is little beside them."""
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, head_dim=64, context=2048)


@pytest.fixture(scope="module")
def ray_address(hosts: tuple[Host, Host]) -> Iterator[str]:
    with ray_over(hosts) as address:
        yield address


def run_client(host: Host, settings: dict[str, object]) -> subprocess.CompletedProcess[str]:
    command = host.command(sys.executable, "-m", "tests.hosts.client", json.dumps(settings))
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=ASKING_S, env=environment, cwd=ROOT
    )


def test_pages_cross_the_network_between_prefill_and_decode(
    hosts: tuple[Host, Host], ray_address: str, model: Path
) -> None:
    wanted = {"model.path": str(model), "ray_address": ray_address, "transport.provider": "tcp", **ENGINE}
    before = {host: host.bytes_received for host in hosts}
    ran = run_client(hosts[0], wanted)
    assert ran.returncode == 0, ran.stderr
    told = Told(**json.loads(ran.stdout.splitlines()[-1]))
    received = {host: host.bytes_received - before[host] for host in hosts}

    assert set(told.hosts.values()) == {host.namespace for host in hosts}, "the nodes are on one host"
    with local_engine(load_model(str(model), "fp32"), load_settings(None, ENGINE).engine) as engine:
        assert {name: tuple(tokens) for name, tokens in told.tokens.items()} == generate(engine, prompts())
    writes = {f"r{length}": LAYERS * pages_sent(length - 1, PAGE) for length in LENGTHS}
    assert {name: counts[:2] for name, counts in told.counts.items()} == {n: [w, w] for n, w in writes.items()}
    assert set(told.providers.values()) == {"tcp"}
    for node, host in ((node, host) for node in told.hosts for host in hosts if told.hosts[node] == host.namespace):
        assert [wire for wire in told.wires[node] if f"tcp over {host.address}" in wire], told.wires
        if node.startswith("decode"):
            moved = sum(counts[2] for counts in told.counts.values())
            assert received[host] >= moved > sum(writes.values()) * 4096
