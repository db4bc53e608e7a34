"""A program on one of the hosts: starts pdserve on the Ray cluster there, asks, and prints what came as JSON.

Its argument is the settings, as JSON with dotted keys. Run by `test_two_hosts.py`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from actors.launch import Cluster, launch
from pdserve.config import load_settings
from pdserve.errors import PdserveError
from pdserve.types import GenerationRequest, RequestId, SamplingParams
from tests.actors.conftest import eventually, generate_all, pools_are_whole, tokens_of

ROOT = Path(__file__).parents[2]
LENGTHS = (17, 64, 65, 900)
ANSWER = 24


@dataclass(frozen=True, slots=True)
class Told:
    """Of each request by its id; of each node by its id."""

    tokens: dict[str, list[int]]
    counts: dict[str, list[int]]
    """Writes counted, writes expected, bytes expected."""
    providers: dict[str, str]
    hosts: dict[str, int]
    """The network namespace's number."""
    wires: dict[str, list[str]]


def prompts() -> list[GenerationRequest]:
    """The same in every process. No prompt begins like another."""
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    return [
        GenerationRequest(RequestId(f"r{n}"), tuple((7 * n + 3 * i) % 250 for i in range(n)), sampling) for n in LENGTHS
    ]


def ask(cluster: Cluster) -> Told:
    answers = generate_all(cluster, prompts())
    traces = {request: cluster.trace(request) for request in answers}
    eventually(lambda: pools_are_whole(cluster), "all pages are free")
    metrics = cluster.metrics()
    return Told(
        tokens={request: tokens_of(outputs) for request, outputs in answers.items()},
        counts={r: [t.writes_counted, t.writes_expected, t.bytes_expected] for r, t in traces.items() if t},
        providers={request: trace.provider for request, trace in traces.items() if trace},
        hosts={node: os.stat(f"/proc/{card.pid}/ns/net").st_ino for node, card in cluster.cards().items()},
        wires={node: [name for name in values if "wire_info" in name] for node, values in metrics.items()},
    )


def main(given: str) -> int:
    try:
        with launch(load_settings(None, json.loads(given)), http=False) as cluster:
            print(json.dumps(asdict(ask(cluster))))
    except PdserveError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
