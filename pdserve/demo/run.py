"""Starts a cluster, asks everything at once, streams the answers, and compares them with a colocated engine's."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from actors.launch import Cluster, launch
from pdserve.config import Settings
from pdserve.demo.memory import process_memory, tree_memory
from pdserve.demo.prompts import DemoPrompt, demo_prompts
from pdserve.demo.record import RequestRecord, Streamed
from pdserve.demo.report import print_report
from pdserve.engine.local import generate, local_engine
from pdserve.errors import ConfigError, PdserveError
from pdserve.messenger.target import HandoffTrace
from pdserve.models.load import load_model
from pdserve.observe import progress
from pdserve.text import Tokenizer
from pdserve.types import GenerationRequest, RequestId, SamplingParams
from pdserve.workload.server_client import ServerClient

TRACE_WAIT_S = 10.0
LINE_WIDTH = 96


def run(settings: Settings, json_path: Path | None) -> int:
    """Exit status 0 when every answer came and equals the colocated engine's. Raises ConfigError."""
    if settings.deployment.colocated.count:
        raise ConfigError("deployment.colocated: the demo shows prefill and decode on different nodes; leave it 0")
    with launch(settings) as cluster:
        tokenizer = Tokenizer.from_directory(cluster.model_path)
        prompts = demo_prompts(tokenizer, cluster.max_model_len)
        counts = f"{settings.deployment.prefill.count} prefill, {settings.deployment.decode.count} decode nodes"
        print(f"\n{cluster.model_name} at {cluster.url}: {counts}\n")
        answers = _ask_all(cluster, prompts)
        traces = [_trace(cluster, answer) for answer in answers]
        memory = _memory(cluster)
        model_path = cluster.model_path
    failures = [_failure(*row) for row in zip(prompts, answers, traces, strict=True)]
    if any(failures):
        print("\n".join(filter(None, failures)))
        return 1
    with progress("computing the same answers on a colocated engine"):
        colocated = _colocated(settings, model_path, prompts)
    records = [RequestRecord(*row) for row in zip(prompts, answers, traces, colocated, strict=True)]
    print_report(records)
    _print_memory(memory)
    if json_path is not None:
        json_path.write_text(json.dumps({"requests": [r.as_json() for r in records], "memory": memory}, indent=1))
    equal = all(record.equal for record in records)
    counted = all(record.trace and record.trace.writes_counted == record.trace.writes_expected for record in records)
    print(f"\n{'all answers equal the colocated engine, token for token' if equal else 'ANSWERS DIFFER'}")
    return 0 if equal and counted else 1


def _failure(prompt: DemoPrompt, answer: Streamed, trace: HandoffTrace | None) -> str | None:
    if answer.error is not None:
        return f"{prompt.name} failed: {answer.error}"
    if trace is None or trace.timings is None or not trace.timings.layers:
        return f"{prompt.name}: answered, but its prefill node reported no timings within {TRACE_WAIT_S:.0f} s"
    return None


def _ask_all(cluster: Cluster, prompts: list[DemoPrompt]) -> list[Streamed]:
    client, answers = ServerClient(cluster.url), [Streamed() for _ in prompts]
    lock = threading.Lock()
    threads = [
        threading.Thread(target=_ask, args=(client, cluster.model_name, prompt, answer, lock), name=prompt.name)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _ask(client: ServerClient, model: str, prompt: DemoPrompt, answer: Streamed, lock: threading.Lock) -> None:
    body = {
        "model": model,
        "prompt": list(prompt.tokens),
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    line = _Line(prompt.name, lock)
    sent = time.monotonic()
    try:
        for event in client.stream("/v1/completions", body):
            now = time.monotonic() - sent
            choice = event["choices"][0]
            answer.request_id = f"{event['id']}-{choice['index']}"
            answer.text += choice["text"]
            answer.tokens += choice["token_ids"]
            answer.arrivals += [now] * len(choice["token_ids"])
            line.add(choice["text"])
    except (PdserveError, OSError) as error:
        answer.error = str(error)
    line.end()


class _Line:
    """Several answers share one terminal: each is printed by the line, with its name."""

    def __init__(self, name: str, lock: threading.Lock) -> None:
        self._name, self._lock, self._text = name, lock, ""

    def add(self, text: str) -> None:
        *lines, self._text = (self._text + text).split("\n")
        while len(self._text) > LINE_WIDTH and " " in self._text.rstrip():
            head, _, self._text = self._text.rpartition(" ")
            lines.append(head)
        self._print(lines)

    def end(self) -> None:
        self._print([self._text])

    def _print(self, lines: list[str]) -> None:
        with self._lock:
            for line in lines:
                if line.strip():
                    print(f"{self._name:>8} │ {line}", flush=True)


def _trace(cluster: Cluster, answer: Streamed) -> HandoffTrace | None:
    """A trace is complete once the prefill node's `Done` has come, which may be after the last token."""
    deadline = time.monotonic() + TRACE_WAIT_S
    while True:
        trace = cluster.trace(RequestId(answer.request_id))
        if trace is not None and trace.timings is not None:
            return trace
        if time.monotonic() > deadline or answer.error is not None:
            return trace
        time.sleep(0.05)


def _colocated(settings: Settings, model_path: str, prompts: list[DemoPrompt]) -> list[tuple[int, ...]]:
    model = load_model(model_path, settings.engine.dtype, deterministic=settings.engine.deterministic)
    requests = [
        GenerationRequest(RequestId(p.name), p.tokens, SamplingParams(max_tokens=p.max_tokens, temperature=0.0))
        for p in prompts
    ]
    with local_engine(model, settings.engine) as engine:
        answers = generate(engine, requests)
    return [answers[request.request_id] for request in requests]


def _memory(cluster: Cluster) -> dict[str, Any]:
    nodes = {}
    for node, card in cluster.cards().items():
        memory = process_memory(card.pid)
        if memory is not None:
            nodes[node] = {"pss_bytes": memory.total, "beside_pool_bytes": memory.beside_pool}
    return {"nodes": nodes, "total_pss_bytes": tree_memory()}


def _print_memory(memory: dict[str, Any]) -> None:
    print("\nMemory (PSS, MiB):", end=" ")
    for node, sizes in memory["nodes"].items():
        print(f"{node} {sizes['pss_bytes'] / 2**20:.0f} ({sizes['beside_pool_bytes'] / 2**20:.0f} beside", end=" ")
        print("its page pool)", end=", ")
    print(f"everything {memory['total_pss_bytes'] / 2**20:.0f}")
