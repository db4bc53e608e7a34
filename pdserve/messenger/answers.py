"""A prefill node's final answers to one decode node: repeated messages get them again, and nothing runs twice."""

from __future__ import annotations

from collections import OrderedDict

from pdserve.messenger.wire import Done, HandoffId, Quiesced, Reject

Answer = Reject | Quiesced | Done

KEPT = 4096


class Answers:
    """The newest answers, and a floor: a handoff number below it is void and must not be carried out.

    Such a message comes from before the last meeting (D has revoked what it gave), or its answer has been forgotten.
    """

    def __init__(self, floor: int, kept: int = KEPT) -> None:
        self._floor = floor
        self._kept = kept
        self._by_number: OrderedDict[int, Answer] = OrderedDict()

    def get(self, handoff: HandoffId) -> Answer | None:
        return self._by_number.get(handoff.number)

    def void(self, handoff: HandoffId) -> bool:
        """True if it may have been answered, or given up by D, without a record here."""
        return handoff.number < self._floor and handoff.number not in self._by_number

    def put(self, handoff: HandoffId, answer: Answer) -> None:
        self._by_number[handoff.number] = answer
        while len(self._by_number) > self._kept:
            oldest, _ = self._by_number.popitem(last=False)
            self._floor = max(self._floor, oldest + 1)
