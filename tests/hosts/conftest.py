"""Several hosts on one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.hosts.namespaces import Host, NoNamespaces, two_hosts


@pytest.fixture(scope="session")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two of them, joined at 10 Gbit/s; skips where this machine has no namespaces for us."""
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts())
        except NoNamespaces as error:
            pytest.skip(str(error))
        yield pair
