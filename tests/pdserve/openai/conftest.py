from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
