from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import openai
import pytest

from tests.pdserve.openai.scripted_backend import ScriptedBackend, Served, serving


@pytest.fixture(scope="module")
def one_server() -> Iterator[Served]:
    with serving(ScriptedBackend()) as served:
        yield served


@pytest.fixture
def served(one_server: Served) -> Served:
    one_server.backend.reset()
    return one_server


@pytest.fixture
def backend(served: Served) -> ScriptedBackend:
    return served.backend


@pytest.fixture(scope="module")
def http(one_server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=one_server.url) as client:
        yield client


@pytest.fixture(scope="module")
def one_client(one_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{one_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(served: Served, one_client: openai.OpenAI) -> openai.OpenAI:
    return one_client
