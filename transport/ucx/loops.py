"""The loops that put, poll and wait, and what UCX calls when something arrives.

Plain functions over integers and int64 arrays. `posting.py` binds the foreign calls and the memory accesses, which are
globals here, and runs this same source either compiled by numba (without the GIL) or interpreted, through ctypes.

A *batch* is a row of `batches`: `STAGE REQUEST TICKET COUNT PUT…`. It is free, flushing (its puts are posted and the
flush behind them is not complete), telling (the active message with its immediate is not sent yet) or broken. Its two
words of `headers` are what that message carries: immediate and count, and the identity of the link that it is for.
"""

from __future__ import annotations

from typing import Any

call_progress: Any = None
call_put: Any = None
call_flush: Any = None
call_tell: Any = None
call_check: Any = None
call_free: Any = None
call_arm: Any = None
call_copy: Any = None
call_ppoll: Any = None
load: Any = None
store: Any = None

PROGRESS, PUT, FLUSH, TELL, CHECK, FREE, ARM, COPY, PPOLL = range(9)
"""Columns of `table`: the addresses of the functions."""
WORKER, EP, PLAIN, EAGER, HEADERS, PEER, BLOCK = range(7)
"""Columns of `lane`: handles; parameters of flushes and of messages; address of `headers`; the peer's identity;
the arrival block."""
RKEY, PARAM, SOURCE, SOURCE_STRIDE, TARGET, TARGET_STRIDE, LENGTH, IMM, TICKET = range(9)
"""Columns of `job`: what one part of a transfer puts."""
STAGE, REQUEST, TICKET_OF, COUNT, PUTS = range(5)
"""Columns of a batch."""
FREE_ROW, FLUSHING, TELLING, BROKEN = range(4)

(
    N_IMMS, N_FRAMES, DAMAGED, OVERRUN, EP_STATUS, IDENTITY, N_ANSWERS,
    IMMS, FRAMES, ANSWERS, ANSWER_PARAM, COPY_AT, TELL_AT, FREE_AT, BLOCK_WORDS,
) = range(15)  # fmt: skip
"""Words of an arrival block: counts, faults and the link's identity; where tables and functions lie."""
IMM_CAPACITY = 8192
FRAME_CAPACITY = 128
FRAME_DATA_BYTES = 4096
FRAME_STRIDE = 16 + FRAME_DATA_BYTES
"""Kind and length of the data; the data."""
ANSWER_CAPACITY = 256
IMM_ID, FRAME_ID = 1, 2
"""Of the active messages."""
HELLO, WELCOME, REFUSED, FRAGMENT = range(1, 5)
"""Kinds of frames. Their header is kind, the identity of the link that it is for, and that of the sender's."""
FRAME_HEADER_BYTES = 24
MOST_PER_BATCH = 64

_IN_PROGRESS = 1
_REPLY_EP = 1 << 0
_RENDEZVOUS = 1 << 17
_LEAST_STATUS = -100
_TURNS = 16
"""So many times a worker is asked for progress at once."""


def post(
    table: Any, lane: Any, job: Any, source_index: Any, target_index: Any, start: int, stop: int, batches: Any,
    headers: Any,
) -> tuple[int, int]:  # fmt: skip
    """Puts blocks `start:stop` while batches are free. Returns (how many were posted, status of what ended it)."""
    n = start
    status = 0
    most = batches.shape[1] - PUTS
    for row in range(batches.shape[0]):
        if n >= stop or status < 0:
            break
        if batches[row, STAGE] != FREE_ROW:
            continue
        first = n
        while n < stop and n - first < most:
            request = 0
            if job[LENGTH] > 0:
                request = call_put(
                    table[PUT], lane[EP], job[SOURCE] + job[SOURCE_STRIDE] * source_index[n], job[LENGTH],
                    job[TARGET] + job[TARGET_STRIDE] * target_index[n], job[RKEY], job[PARAM],
                )  # fmt: skip
            if _LEAST_STATUS <= request < 0:
                status = request
                break
            batches[row, PUTS + n - first] = request
            n += 1
        if n == first:
            break
        flush = 0
        stage = FLUSHING
        if job[LENGTH] > 0:
            flush = call_flush(table[FLUSH], lane[EP], lane[PLAIN])
            if _LEAST_STATUS <= flush < 0:
                status = flush
                flush = 0
                stage = BROKEN
        headers[row, 0] = job[IMM] | (n - first) << 32
        headers[row, 1] = lane[PEER]
        batches[row, REQUEST] = flush
        batches[row, TICKET_OF] = job[TICKET]
        batches[row, COUNT] = n - first
        batches[row, STAGE] = stage
    return n - start, status


def settle(table: Any, request: int) -> int:
    """1 while the request is under way; else frees it and returns its status."""
    if request == 0:
        return 0
    status: int = call_check(table[CHECK], request)
    if status != _IN_PROGRESS:
        call_free(table[FREE], request)
    return status


def pump(table: Any, lane: Any, batches: Any, tickets: Any) -> tuple[int, int, int]:
    """Makes progress and moves batches on. Returns (whether anything moved, tickets of what completed, status)."""
    moved = 0
    for _ in range(_TURNS):
        if call_progress(table[PROGRESS], lane[WORKER]) == 0:
            break
        moved = 1
        # What one call lets in fits the other half.
        if 2 * load(lane[BLOCK] + 8 * N_IMMS) > IMM_CAPACITY or 2 * load(lane[BLOCK] + 8 * N_FRAMES) > FRAME_CAPACITY:
            break
    n_tickets = 0
    failed = 0
    for row in range(batches.shape[0]):
        if batches[row, STAGE] == FREE_ROW or batches[row, STAGE] == BROKEN:
            continue
        status = settle(table, batches[row, REQUEST])
        if status == _IN_PROGRESS:
            continue
        batches[row, REQUEST] = 0
        if batches[row, STAGE] == FLUSHING and status >= 0:
            for k in range(PUTS, PUTS + batches[row, COUNT]):
                put = settle(table, batches[row, k])
                if put != _IN_PROGRESS:
                    batches[row, k] = 0
                if put != 0 and status >= 0:
                    status = put
            if status == 0:
                sent = call_tell(
                    table[TELL], lane[EP], IMM_ID, lane[HEADERS] + 16 * row, 16, 0, 0, lane[EAGER]
                )  # fmt: skip
                if _LEAST_STATUS <= sent < 0:
                    status = sent
                else:
                    batches[row, REQUEST] = sent
                    batches[row, STAGE] = TELLING
                    status = settle(table, sent)
                    if status != _IN_PROGRESS:
                        batches[row, REQUEST] = 0
        if status < 0:
            failed = status
            batches[row, STAGE] = BROKEN
        elif status == 0:
            moved = 1
            for _ in range(batches[row, COUNT]):
                tickets[n_tickets] = batches[row, TICKET_OF]
                n_tickets += 1
            batches[row, STAGE] = FREE_ROW
    return moved, n_tickets, failed


def discard(table: Any, batches: Any) -> int:
    """Frees all requests of all batches that are settled; returns how many are not."""
    left = 0
    for row in range(batches.shape[0]):
        if batches[row, STAGE] == FREE_ROW:
            continue
        before = left
        if settle(table, batches[row, REQUEST]) == _IN_PROGRESS:
            left += 1
        else:
            batches[row, REQUEST] = 0
        for k in range(PUTS, PUTS + batches[row, COUNT]):
            if settle(table, batches[row, k]) == _IN_PROGRESS:
                left += 1
            else:
                batches[row, k] = 0
        if left == before:
            batches[row, STAGE] = FREE_ROW
    return left


def rest(
    table: Any, workers: Any, pollfds: Any, pollfds_address: int, timespec: Any, timespec_address: int, spins: int,
    total_ns: int,
) -> int:  # fmt: skip
    """Polls all workers `spins` times, then sleeps until one has something, the event (the first) or `total_ns`.

    Returns 1 if there may be something, 0 after the time, -2 when the event woke it.
    """
    for _ in range(spins):
        for i in range(workers.shape[0]):
            if call_progress(table[PROGRESS], workers[i]) != 0:
                return 1
    for i in range(workers.shape[0]):
        if call_arm(table[ARM], workers[i]) != 0:
            return 1
    for i in range(pollfds.shape[0]):
        pollfds[i] = pollfds[i] & 0xFFFFFFFFFFFF
    timespec[0] = total_ns // 1000000000
    timespec[1] = total_ns % 1000000000
    ready = call_ppoll(table[PPOLL], pollfds_address, pollfds.shape[0], timespec_address, 0)
    if ready <= 0:
        return 0
    if (pollfds[0] >> 48) & 0xFFFF:
        return -2
    return 1


def on_immediate(block: int, header: int, header_length: int, data: int, length: int, param: int) -> int:
    """An active message with an immediate: two words, the second of which must name this link."""
    times = 0
    imm = 0
    if header_length == 16 and load(header + 8) == load(block + 8 * IDENTITY):
        imm = load(header) & 0xFFFFFFFF
        times = (load(header) >> 32) & 0xFFFFFFFF
    if times < 1 or times > MOST_PER_BATCH:
        store(block + 8 * DAMAGED, load(block + 8 * DAMAGED) + 1)
        return 0
    n = load(block + 8 * N_IMMS)
    at = load(block + 8 * IMMS) + 16 * n
    if n > 0 and load(at - 16) == imm:
        store(at - 8, load(at - 8) + times)
    elif n < IMM_CAPACITY:
        store(at, imm)
        store(at + 8, times)
        store(block + 8 * N_IMMS, n + 1)
    else:
        store(block + 8 * OVERRUN, 1)
    return 0


def on_frame(block: int, header: int, header_length: int, data: int, length: int, param: int) -> int:
    """Any other active message: a greeting is answered at once, anything else copied for the worker to read."""
    flags = load(param)
    if header_length != FRAME_HEADER_BYTES or length > FRAME_DATA_BYTES or flags & _RENDEZVOUS:
        store(block + 8 * DAMAGED, load(block + 8 * DAMAGED) + 1)
        return 0
    mine = load(header + 8) == load(block + 8 * IDENTITY)
    if load(header) == HELLO:
        if flags & _REPLY_EP:
            answer(block, load(header + 16), mine, load(param + 8))
        return 0
    n = load(block + 8 * N_FRAMES)
    if not mine:
        store(block + 8 * DAMAGED, load(block + 8 * DAMAGED) + 1)
    elif n >= FRAME_CAPACITY:
        store(block + 8 * OVERRUN, 1)
    else:
        at = load(block + 8 * FRAMES) + FRAME_STRIDE * n
        store(at, load(header))
        store(at + 8, length)
        call_copy(load(block + 8 * COPY_AT), at + 16, data, length)
        store(block + 8 * N_FRAMES, n + 1)
    return 0


def answer(block: int, greeter: int, mine: bool, ep: int) -> None:
    """Welcomes or refuses who greeted. The endpoint is sure to be there only while UCX is calling."""
    n = load(block + 8 * N_ANSWERS)
    store(block + 8 * N_ANSWERS, n + 1)
    at = load(block + 8 * ANSWERS) + FRAME_HEADER_BYTES * (n % ANSWER_CAPACITY)
    store(at, WELCOME if mine else REFUSED)
    store(at + 8, greeter)
    store(at + 16, load(block + 8 * IDENTITY))
    request = call_tell(
        load(block + 8 * TELL_AT), ep, FRAME_ID, at, FRAME_HEADER_BYTES, 0, 0, load(block + 8 * ANSWER_PARAM)
    )  # fmt: skip
    if request != 0 and not _LEAST_STATUS <= request < 0:
        call_free(load(block + 8 * FREE_AT), request)


def on_error(block: int, ep: int, status: int) -> None:
    """The endpoint has failed: nothing more will go through it."""
    if load(block + 8 * EP_STATUS) == 0:
        store(block + 8 * EP_STATUS, status)
