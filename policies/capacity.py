"""How many decode nodes one prefill node feeds: arithmetic over token rates, for sizing and for reports.

A request costs the prefill side its prompt tokens that no cache has, and the decode side its output tokens. In balance
both sides finish equally many requests a second. Queueing is not in it: `utilisation` leaves the room that keeps
queues short. Rates are measured ones, of the shapes in question: a decode node's depends on batch and context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """The mean request. `cached_share`: of the prompt, how much is found in prefix caches."""

    prompt_tokens: float
    output_tokens: float
    cached_share: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(
                f"prompt_tokens ({self.prompt_tokens:g}) and output_tokens ({self.output_tokens:g}) must be at least 1"
            )
        if not 0 <= self.cached_share < 1:
            raise ValueError(f"cached_share is {self.cached_share:g}, allowed: from 0 to below 1")

    @property
    def computed_tokens(self) -> float:
        return self.prompt_tokens * (1 - self.cached_share)


@dataclass(frozen=True, slots=True)
class NodeRates:
    """What one node of each side does, in tokens a second; `utilisation`: how much of it is to be used."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    utilisation: float = 0.8

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.prefill_tokens_per_s <= 0 or self.decode_tokens_per_s <= 0:
            raise ValueError(
                f"prefill_tokens_per_s ({self.prefill_tokens_per_s:g}) and decode_tokens_per_s "
                f"({self.decode_tokens_per_s:g}) must be above 0"
            )
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation is {self.utilisation:g}, allowed: above 0, to 1")


def prefill_requests_per_s(rates: NodeRates, workload: Workload) -> float:
    """What one prefill node takes."""
    return rates.utilisation * rates.prefill_tokens_per_s / workload.computed_tokens


def decode_requests_per_s(rates: NodeRates, workload: Workload) -> float:
    """What one decode node takes."""
    return rates.utilisation * rates.decode_tokens_per_s / workload.output_tokens


def decode_nodes_per_prefill_node(rates: NodeRates, workload: Workload) -> float:
    """Below 1 where one decode node needs several prefill nodes. Independent of `utilisation`."""
    return prefill_requests_per_s(rates, workload) / decode_requests_per_s(rates, workload)


def nodes_for(requests_per_s: float, rates: NodeRates, workload: Workload) -> tuple[int, int]:
    """(prefill nodes, decode nodes) that hold `requests_per_s`; one of each at least."""
    if requests_per_s < 0:
        raise ValueError(f"requests_per_s is {requests_per_s:g}, allowed: at least 0")
    needed = (
        requests_per_s / prefill_requests_per_s(rates, workload),
        requests_per_s / decode_requests_per_s(rates, workload),
    )
    # Rates are measured: a billionth of a node too few is not a node more.
    prefill, decode = (max(1, math.ceil(nodes - 1e-9)) for nodes in needed)
    return prefill, decode


def running_requests(requests_per_s: float, workload: Workload, tokens_per_s_and_stream: float) -> float:
    """Requests in decode at once (Little's law): what the batches and the page pools of all decode nodes must hold."""
    if tokens_per_s_and_stream <= 0:
        raise ValueError(f"tokens_per_s_and_stream is {tokens_per_s_and_stream:g}, allowed: above 0")
    return requests_per_s * workload.output_tokens / tokens_per_s_and_stream


def transfer_bytes_per_s(requests_per_s: float, workload: Workload, cache_bytes_per_token: float) -> float:
    """What handoffs move, all nodes together: only tokens that the decode side has not cached travel."""
    return requests_per_s * workload.computed_tokens * cache_bytes_per_token
