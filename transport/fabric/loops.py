"""The loops that post writes and drain completion queues.

Plain functions over integers and int64 arrays. `posting.py` binds the foreign calls, which are globals here, and runs
this same source either compiled by numba (without the GIL) or interpreted, with the calls made by ctypes.

`slots`, of which a lane has one per operation it may have outstanding: the first are for writes, `owner[slot]` being
the ticket of the part that holds it (0: none) and `free[:top[0]]` the stack of free ones; the others are for messages.
A slot's context is `contexts + 64 * slot`, memory that some providers write to while the operation lasts; a completion
is told by it.
"""

from __future__ import annotations

from typing import Any

call_write: Any = None
call_read: Any = None
call_ppoll: Any = None
call_trywait: Any = None
call_clock: Any = None

_CONTEXT_BYTES = 64
_ENTRY_WORDS = 5
_REMOTE_WRITE = 1 << 13
_WRITE = 1 << 9
_WRITE_BITS = _WRITE | _REMOTE_WRITE
_EAGAIN = -11
_REFUSALS = 64
_SLOT_MASK = (1 << 20) - 1
_STREAM_SPIN_NS = 500000
_COLLECT_NS = 4000000
_MONOTONIC = 1


def post(
    write: int,
    ep: int,
    desc: int,
    dest: int,
    key: int,
    imm: int,
    length: int,
    source: int,
    source_stride: int,
    source_index: Any,
    target: int,
    target_stride: int,
    target_index: Any,
    start: int,
    stop: int,
    ticket: int,
    contexts: int,
    owner: Any,
    free: Any,
    top: Any,
) -> tuple[int, int]:
    """Posts writes `start:stop` while slots last. Returns (how many were posted, code of the call that ended it)."""
    code = 0
    n = start
    while n < stop and top[0] > 0:
        slot = free[top[0] - 1]
        code = call_write(
            write,
            ep,
            source + source_stride * source_index[n],
            length,
            desc,
            imm,
            dest,
            target + target_stride * target_index[n],
            key,
            contexts + _CONTEXT_BYTES * slot,
        )
        if code != 0:
            break
        owner[slot] = ticket
        top[0] -= 1
        n += 1
    return n - start, code


def post_one(request: Any, ticket: int, owner: Any, free: Any, top: Any) -> int:
    """Posts one write, for which there is a slot; see `Request`. Returns the call's code."""
    slot = free[top[0] - 1]
    code: int = call_write(
        request[0], request[1], request[2], request[3], request[4], request[5], request[6], request[7], request[8],
        request[9] + _CONTEXT_BYTES * slot,
    )  # fmt: skip
    if code == 0:
        owner[slot] = ticket
        top[0] -= 1
    return code


def peek(read: int, cq: int, buffer: int, capacity: int) -> int:
    """Reads the queue into its buffer: how many entries, or a negative code."""
    code: int = call_read(read, cq, buffer, capacity)
    return code


def take(
    entries: Any,
    count: int,
    contexts: int,
    slots: int,
    owner: Any,
    free: Any,
    top: Any,
    tickets: Any,
    imms: Any,
    events: Any,
    filled: Any,
) -> int:
    """Sorts `count` entries into the outputs; `filled` says how many each has: tickets, immediates, events.

    Events are completed messages, as pairs of slot (from the first message slot on) and length. Returns 1 if the
    outputs have no room for as many entries again.
    """
    capacity = entries.shape[0] // _ENTRY_WORDS
    most = min(tickets.shape[0], imms.shape[0], events.shape[0] // 2) - capacity
    writes = owner.shape[0]
    for i in range(count):
        # First by the flag: a completion of the peer's write may carry a stale context of our own.
        if entries[_ENTRY_WORDS * i + 1] & _WRITE_BITS == _REMOTE_WRITE:
            imms[filled[1]] = entries[_ENTRY_WORDS * i + 4] & 0xFFFFFFFF
            filled[1] += 1
            continue
        slot = (entries[_ENTRY_WORDS * i] - contexts) // _CONTEXT_BYTES
        if 0 <= slot < writes:
            if owner[slot] == 0:
                continue
            tickets[filled[0]] = owner[slot]
            owner[slot] = 0
            filled[0] += 1
            free[top[0]] = slot
            top[0] += 1
        elif writes <= slot < slots:
            events[2 * filled[2]] = slot - writes
            events[2 * filled[2] + 1] = entries[_ENTRY_WORDS * i + 2]
            filled[2] += 1
    return 1 if max(filled[0], filled[1], filled[2]) > most else 0


def drain(
    read: int,
    cq: int,
    entries: Any,
    entries_address: int,
    count: int,
    contexts: int,
    slots: int,
    owner: Any,
    free: Any,
    top: Any,
    tickets: Any,
    imms: Any,
    events: Any,
    filled: Any,
) -> int:
    """Takes the `count` entries that were read before, then reads on until the queue is empty or the outputs full.

    Returns the last code: -EAGAIN when the queue is empty, positive when there may be more. See `take`.
    """
    filled[:] = 0
    code = count
    if code == 0:
        code = call_read(read, cq, entries_address, entries.shape[0] // _ENTRY_WORDS)
    while code > 0:
        if take(entries, code, contexts, slots, owner, free, top, tickets, imms, events, filled):
            break
        code = call_read(read, cq, entries_address, entries.shape[0] // _ENTRY_WORDS)
    return code


def stream(
    write: int,
    ep: int,
    desc: int,
    dest: int,
    key: int,
    imm: int,
    length: int,
    source: int,
    source_stride: int,
    source_index: Any,
    target: int,
    target_stride: int,
    target_index: Any,
    start: int,
    stop: int,
    ticket: int,
    contexts: int,
    owner: Any,
    free: Any,
    top: Any,
    room: int,
    read: int,
    cq: int,
    entries: Any,
    entries_address: int,
    slots: int,
    tickets: Any,
    imms: Any,
    events: Any,
    filled: Any,
    slice_ns: int,
    clock: int,
    timespec: Any,
    timespec_address: int,
) -> tuple[int, int, int]:
    """`post`, with `drain` whenever the room is full, until all are posted, something fails or `slice_ns` are over.

    `room` is how many may be posted before others complete. Returns (how many were posted, last code of a post, last
    code of a read); see `post`, `drain`.
    """
    filled[:] = 0
    n = start
    posted = 0
    code = 0
    got = 0
    until = 0
    while True:
        before = filled[0]
        posted, code = post(
            write, ep, desc, dest, key, imm, length, source, source_stride, source_index,
            target, target_stride, target_index, n, min(stop, n + room), ticket, contexts, owner, free, top,
        )  # fmt: skip
        n += posted
        room -= posted
        if n == stop or (code != 0 and code != _EAGAIN):
            return n - start, code, _EAGAIN
        got = call_read(read, cq, entries_address, entries.shape[0] // _ENTRY_WORDS)
        if got > 0:
            if take(entries, got, contexts, slots, owner, free, top, tickets, imms, events, filled):
                return n - start, code, got
            room += filled[0] - before
        elif got != _EAGAIN and got != 0:
            return n - start, code, got
        call_clock(clock, _MONOTONIC, timespec_address)
        now = timespec[0] * 1000000000 + timespec[1]
        if until == 0:
            until = now + slice_ns
        if now >= until:
            return n - start, code, got


def rest(
    queues: Any,
    queues_address: int,
    entries: Any,
    entries_address: int,
    imms: Any,
    armed: Any,
    left: Any,
    kept: Any,
    patient: int,
    woken: Any,
    spin_ns: int,
    sleep_ns: int,
    longest_ns: int,
    total_ns: int,
    clock: int,
    ppoll: int,
    polls: Any,
    polls_address: int,
    fixed: int,
    timespec: Any,
    timespec_address: int,
) -> tuple[int, int, int, int, int]:
    """Polls all queues, for `spin_ns` without a break and then between sleeps that double up to `longest_ns`.

    `queues` is `(queues, 4)`: read, cq, fabric and trywait of each (0: it cannot be waited for). `polls` are what ppoll
    takes: `fixed` descriptors, of which any ends the rest, and one per queue, or -1. With `sleep_ns` 0 it ends instead
    of sleeping.

    Immediates that fill no counter are no reason to end: they are collected, and it polls without a break while they
    stream in. `armed[slot]` is the immediate of an armed counter plus one (0: none), `left[slot]` how many it lacks.
    If it is `patient`, completions of own writes are no reason either: they are kept, each behind its queue's number.

    Returns (queue, code, next sleep, immediates, kept): the first queue that has something else, its entries left in
    the buffer; queue -1 when a counter is full, after `total_ns` of sleep, or when what was collected has to be looked
    at; -2 when it was woken.
    """
    capacity = entries.shape[0] // _ENTRY_WORDS
    most = imms.shape[0] - capacity
    most_kept = kept.shape[0] // (_ENTRY_WORDS + 1) - capacity
    collected = 0
    owns = 0
    slept = 0
    refused = 0
    spun_until = 0
    collect_until = 0
    while True:
        moved = False
        for i in range(queues.shape[0]):
            code = call_read(queues[i, 0], queues[i, 1], entries_address, capacity)
            if code == _EAGAIN or code == 0:
                continue
            if code < 0:
                return i, code, sleep_ns, collected, owns
            for k in range(code):
                kind = entries[_ENTRY_WORDS * k + 1] & _WRITE_BITS
                if kind != _REMOTE_WRITE and (patient == 0 or kind != _WRITE):
                    return i, code, sleep_ns, collected, owns
            moved = True
            full = False
            for k in range(code):
                if entries[_ENTRY_WORDS * k + 1] & _WRITE_BITS == _WRITE:
                    kept[(_ENTRY_WORDS + 1) * owns] = i
                    for w in range(_ENTRY_WORDS):
                        kept[(_ENTRY_WORDS + 1) * owns + 1 + w] = entries[_ENTRY_WORDS * k + w]
                    owns += 1
                    continue
                imm = entries[_ENTRY_WORDS * k + 4] & 0xFFFFFFFF
                imms[collected] = imm
                collected += 1
                slot = imm & _SLOT_MASK
                if armed[slot] == imm + 1:
                    left[slot] -= 1
                    full = full or left[slot] == 0
            if full or collected > most or owns > most_kept:
                return -1, 0, sleep_ns, collected, owns
        if woken[0] != 0:
            return -2, 0, sleep_ns, collected, owns
        if moved and sleep_ns > 0:
            spin_ns = max(spin_ns, _STREAM_SPIN_NS)
            spun_until = 0
        if spin_ns > 0:
            call_clock(clock, _MONOTONIC, timespec_address)
            now = timespec[0] * 1000000000 + timespec[1]
            if spun_until == 0:
                spun_until = now + spin_ns
            if moved and collect_until == 0:
                collect_until = now + _COLLECT_NS
            if now < spun_until and (collected == 0 or now < collect_until):
                continue
            spin_ns = 0
        if slept >= total_ns or sleep_ns == 0 or collected > 0:
            return -1, 0, sleep_ns, collected, owns
        pause = sleep_ns
        for i in range(queues.shape[0]):
            if queues[i, 3] != 0 and call_trywait(queues[i, 3], queues[i, 2], queues_address + 32 * i + 8, 1) != 0:
                # Something has come in between: look again; but not for ever, if the provider means something else.
                pause = 0 if refused < _REFUSALS else min(sleep_ns, 100000)
                refused += 1
        for i in range(polls.shape[0]):
            polls[i] = polls[i] & 0xFFFFFFFFFFFF
        timespec[0] = pause // 1000000000
        timespec[1] = pause % 1000000000
        if call_ppoll(ppoll, polls_address, polls.shape[0], timespec_address, 0) > 0:
            for i in range(fixed):
                if polls[i] >> 48 != 0:
                    return -2, 0, sleep_ns, collected, owns
        slept += max(pause, 1000)
        sleep_ns = min(2 * sleep_ns, longest_ns)
