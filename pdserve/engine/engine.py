"""The engine: one model on one thread, which callers reach through a mailbox."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pdserve.config import EngineSettings
from pdserve.engine.generation import GenerationLoop, Rank
from pdserve.engine.hooks import DecodeHooks, PrefillHooks, PrefillJob
from pdserve.engine.limits import check_request, context_tokens
from pdserve.engine.prefill import PrefillLoop
from pdserve.engine.scheduler import Limits
from pdserve.engine.sequence import Sequence
from pdserve.engine.stats import EngineLoad, EngineStats, StatsRecorder
from pdserve.errors import PdserveError, RequestError
from pdserve.kv.memory import KvMemory
from pdserve.kv.pool import PagePool
from pdserve.models.api import Model
from pdserve.types import GenerationRequest, PageIndex, RequestId, Role

_log = logging.getLogger(__name__)


class _Loop(Protocol):
    """Either role's loop, run by the engine's thread alone."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...
    def cancel(self, request_id: RequestId) -> None: ...
    def abort_all(self, reason: str) -> None: ...
    def step(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Queue:
    running: int = 0
    waiting: int = 0
    tokens: int = 0

    def plus(self, other: _Queue) -> _Queue:
        return _Queue(self.running + other.running, self.waiting + other.waiting, self.tokens + other.tokens)


class Engine:
    """Continuous batching in one of three roles. All methods are safe from any thread and only queue: the work is done
    on the engine's thread, in the order of the calls, between steps.

    Every role leaves the prompt's last token to the first decode step. `layer_counter` `(1,) int64` is bumped by the
    model after each layer, for whoever watches a step from another thread; it is given where another process bumps it.
    """

    def __init__(
        self,
        model: Model,
        memory: KvMemory,
        pool: PagePool,
        settings: EngineSettings,
        role: Role,
        *,
        decode_hooks: DecodeHooks | None = None,
        prefill_hooks: PrefillHooks | None = None,
        layer_counter: NDArray[np.int64] | None = None,
    ) -> None:
        """Raises ConfigError where the settings ask for a longer context than the model has."""
        if memory.geometry.page_size != settings.page_size or memory.geometry.pages != pool.total:
            raise ValueError(f"settings, memory and pool disagree: {settings}, {memory.geometry}, {pool.total} pages")
        self.model = model
        self.pool = pool
        self.settings = settings
        self.role = role
        self.decode_hooks = decode_hooks
        self.prefill_hooks = prefill_hooks
        self.layer_counter = np.zeros(1, dtype=np.int64) if layer_counter is None else layer_counter
        self._context = context_tokens(model.config, settings)
        self._stats = StatsRecorder()
        self._wake = threading.Condition(threading.Lock())
        self._mail: list[Callable[[], None]] = []
        self._live: set[RequestId] = set()
        self._pages_freed = False
        self._closing = False
        self._mailed = _Queue()
        self._inside = _Queue()
        rank = Rank(model, memory, self.layer_counter, Limits.of(settings), self._stats)
        self._generation: GenerationLoop | None = None
        self._prefill: PrefillLoop | None = None
        self._loop: _Loop = self._make_loop(rank)
        self._thread = threading.Thread(target=self._work, name=f"pdserve-engine-{role}", daemon=True)
        self._unsubscribe: Callable[[], None] = lambda: None

    def _make_loop(self, rank: Rank) -> _Loop:
        if self.role is Role.PREFILL:
            if self.prefill_hooks is None:
                raise ValueError("a prefill engine needs prefill_hooks")
            self._prefill = PrefillLoop(rank, self.prefill_hooks, self._forget)
            return self._prefill
        if self.decode_hooks is None:
            raise ValueError(f"a {self.role} engine needs decode_hooks")
        self._generation = GenerationLoop(rank, self.pool, self.decode_hooks, self.role, self._forget)
        return self._generation

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._unsubscribe = self.pool.subscribe(self._on_pages_freed)
        self._thread.start()

    def close(self) -> None:
        """Waits for the step that runs; then every request ends with ABORT, every job with `job_failed`. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is None:
            self._work()  # never started: what was submitted still ends
        elif threading.current_thread() is not self._thread:
            self._thread.join()
        self._unsubscribe()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- generation ----------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Tokens that a request and its answer may have together."""
        return min(self._context, self._pool_tokens)

    @property
    def _pool_tokens(self) -> int:
        return self.pool.total * self.settings.page_size

    def check_request(self, request: GenerationRequest) -> None:
        """What `submit` and `submit_ready` check first, for who wants to know before pages are allotted.

        Raises ContextLengthError, RequestError.
        """
        check_request(request, self.model.config, self._context, self._pool_tokens)

    def submit(self, request: GenerationRequest) -> None:
        """Colocated role: computes the prompt here, then decodes. `max_tokens` is clipped to the context.

        Raises ContextLengthError, RequestError.
        """
        self._only(Role.COLOCATED, "submit")
        self._enter(request, ())

    def submit_ready(
        self, request: GenerationRequest, pages: ListLike[PageIndex], generated: tuple[int, ...] = ()
    ) -> None:
        """Decode role: the cache of `(prompt + generated)[:-1]` is in `pages`, which the engine now owns.

        `generated` came out before a preemption: it counts against the limits and is not output again.
        Raises ContextLengthError, RequestError; then the pages are still the caller's.
        """
        self._only(Role.DECODE, "submit_ready")
        self._enter(request, generated, pages)

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request at any stage, with a last output of finish ABORT. Nothing for one that ended or never was."""
        assert self._generation is not None, "cancel is for requests; a prefill engine has jobs: cancel_job"
        self._post(partial(self._generation.cancel, request_id))

    def _enter(self, request: GenerationRequest, generated: tuple[int, ...], pages: ListLike[PageIndex] = ()) -> None:
        assert self._generation is not None
        self.check_request(request)
        sequence = self._sequence(request, generated, pages)
        queue = _Queue(waiting=1, tokens=sequence.queued_tokens)
        self._post(partial(self._generation.add, sequence), request.request_id, queue)

    def _sequence(self, request: GenerationRequest, generated: tuple[int, ...], pages: ListLike[PageIndex]) -> Sequence:
        known = len(request.prompt) + len(generated)
        if len(generated) >= request.sampling.max_tokens or known >= self.max_model_len:
            raise RequestError(f"request {request.request_id} has ended: {len(generated)} tokens are generated already")
        sequence = Sequence.start(request, self.model.config, self.max_model_len, generated)
        if self.role is Role.DECODE:
            needed = Limits.of(self.settings).pages_for(known - 1)
            if len(pages) < needed:
                raise RequestError(f"request {request.request_id} needs {needed} pages for its cache, not {len(pages)}")
            sequence.add_pages(pages)
            sequence.computed_tokens = sequence.target_tokens
        return sequence

    # -- prefill -------------------------------------------------------------------------------------------------

    def prefill(self, job: PrefillJob) -> None:
        """Prefill role: computes the job's tokens into its pages, first come, first served.

        Raises RequestError.
        """
        self._only(Role.PREFILL, "prefill")
        assert self._prefill is not None
        needed = Limits.of(self.settings).pages_for(len(job.tokens))
        if not job.tokens:
            raise RequestError(f"prefill job {job.job_id} has no tokens: a prompt of one token needs no prefill")
        if len(job.tokens) > self._context:
            raise RequestError(f"prefill job {job.job_id} has {len(job.tokens)} tokens, the context is {self._context}")
        if len(job.pages) != needed:
            raise RequestError(f"prefill job {job.job_id} needs {needed} pages, not {len(job.pages)}")
        queue = _Queue(waiting=1, tokens=len(job.tokens))
        self._post(partial(self._prefill.add, job), job.job_id, queue)

    def cancel_job(self, job_id: RequestId) -> None:
        """Prefill role: leaves the job; `PrefillHooks.job_cancelled` answers once its pages are not touched any more.

        Every call is answered, also for a job that has ended or never was.
        """
        assert self._prefill is not None, "cancel_job is for jobs; requests have cancel"
        self._post(partial(self._prefill.cancel, job_id))

    # -- observation ---------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """What is here now, what was submitted a moment ago included."""
        with self._wake:
            queue = self._inside.plus(self._mailed)
        free, _, quarantined = self.pool.counts()
        return EngineLoad(queue.running, queue.waiting, queue.tokens, free, quarantined, self.pool.total)

    def stats(self) -> EngineStats:
        return self._stats.snapshot()

    # -- mailbox and thread --------------------------------------------------------------------------------------

    def _only(self, role: Role, method: str) -> None:
        if self.role is not role:
            raise ValueError(f"{method} is for the {role} role; this engine's role is {self.role}")

    def _post(self, action: Callable[[], None], entering: RequestId | None = None, queue: _Queue | None = None) -> None:
        with self._wake:
            if entering is not None:
                if self._closing:
                    raise PdserveError("the engine is closed")
                if entering in self._live:
                    raise RequestError(f"request {entering} is already in the engine", "request_id")
                self._live.add(entering)
            if queue is not None:
                self._mailed = self._mailed.plus(queue)
            self._mail.append(action)
            self._wake.notify()

    def _forget(self, request_id: RequestId) -> None:
        with self._wake:
            self._live.discard(request_id)

    def _on_pages_freed(self) -> None:
        with self._wake:
            self._pages_freed = True
            self._wake.notify()

    def _work(self) -> None:
        busy = True
        while True:
            with self._wake:
                while not (self._mail or self._closing or busy or self._pages_freed):
                    self._wake.wait()
                mail, self._mail = self._mail, []
                self._inside, self._mailed = self._inside.plus(self._mailed), _Queue()
                self._pages_freed = False
                closing = self._closing
            busy = self._turn(mail, closing)
            if closing:
                return

    def _turn(self, mail: list[Callable[[], None]], closing: bool) -> bool:
        for action in mail:
            self._guarded(action)
        if closing:
            self._guarded(partial(self._loop.abort_all, "the engine closed"))
        busy = not closing and bool(self._guarded(self._loop.step))
        with self._wake:
            self._inside = _Queue(self._loop.running, self._loop.waiting, self._loop.queued_tokens)
        return busy

    def _guarded(self, action: Callable[[], object]) -> object:
        """Nothing ends the engine's thread: what gets through here is our own fault, and is logged."""
        try:
            return action()
        except Exception:
            _log.exception("the engine failed outside a step; it goes on")
            return None
