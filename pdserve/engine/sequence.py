"""What the engine knows of one request or prefill job while it is alive. Owned by the engine's thread."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.hooks import PrefillJob
from pdserve.engine.scheduler import Progress
from pdserve.models.api import ModelConfig
from pdserve.types import FinishReason, GenerationRequest, PageIndex, RequestId

_NO_PAGES: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_SEED_MASK = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class Paged(Progress):
    """Tokens with a page list: what a step can run."""

    tokens: NDArray[np.int64]  # all known tokens; a buffer that may be longer
    pages: NDArray[np.int64]  # page indices, in order of position; held_pages of them


@dataclass(slots=True, eq=False)
class JobProgress(Paged):
    job: PrefillJob

    @staticmethod
    def of(job: PrefillJob) -> JobProgress:
        tokens = np.array(job.tokens, dtype=np.int64)
        pages = np.array(job.pages, dtype=np.int64)
        return JobProgress(len(tokens), 0, len(pages), tokens, pages, job)


@dataclass(slots=True, eq=False)
class Sequence(Paged):
    """One request on its way: `tokens[:known_tokens]` are the prompt and what was generated."""

    request: GenerationRequest
    known_tokens: int
    last_token: int
    token_limit: int  # known tokens at which the request ends for length
    stop_ids: frozenset[int]
    stops_from: int  # known tokens before which no stop id may be chosen: min_tokens
    seed: int

    @staticmethod
    def start(
        request: GenerationRequest, config: ModelConfig, context: int, generated: tuple[int, ...] = ()
    ) -> Sequence:
        """A sequence without pages, nothing computed. The request has been checked (see `check_request`)."""
        sampling = request.sampling
        known = request.prompt + generated
        limit = min(len(request.prompt) + sampling.max_tokens, context)
        tokens = np.empty(limit, dtype=np.int64)
        tokens[: len(known)] = known
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(config.eos_token_ids))
        return Sequence(
            target_tokens=len(known) - 1,
            computed_tokens=0,
            held_pages=0,
            tokens=tokens,
            pages=_NO_PAGES,
            request=request,
            known_tokens=len(known),
            last_token=known[-1],
            token_limit=limit,
            stop_ids=frozenset(token for token in stop_ids if 0 <= token < config.vocab),
            stops_from=len(request.prompt) + sampling.min_tokens,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed & _SEED_MASK,
        )

    @property
    def id(self) -> RequestId:
        return self.request.request_id

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt) : self.known_tokens].tolist())

    @property
    def queued_tokens(self) -> int:
        """Tokens that chunks still have to compute."""
        return self.target_tokens - self.computed_tokens

    def add_pages(self, pages: ListLike[PageIndex]) -> None:
        self.pages = np.concatenate((self.pages, np.array(pages, dtype=np.int64)))
        self.held_pages = len(self.pages)

    def take_pages(self) -> list[PageIndex]:
        """Gives the pages up: nothing is computed any more."""
        pages = [PageIndex(page) for page in self.pages.tolist()]
        self.pages = _NO_PAGES
        self.held_pages = 0
        self.computed_tokens = 0
        return pages

    def append(self, token: int) -> FinishReason | None:
        """The token that the last known one's decode step has brought; why the request ends with it, if it does."""
        self.tokens[self.known_tokens] = token
        self.known_tokens += 1
        self.last_token = token
        self.computed_tokens += 1
        self.target_tokens += 1
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.known_tokens >= self.token_limit else None
