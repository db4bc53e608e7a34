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
_WRITE_BITS = 1 << 9 | _REMOTE_WRITE
_EAGAIN = -11
_REFUSALS = 64
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


def peek(read: int, cq: int, buffer: int, capacity: int) -> int:
    """Reads the queue into its buffer: how many entries, or a negative code."""
    code: int = call_read(read, cq, buffer, capacity)
    return code


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
) -> tuple[int, int, int, int]:
    """Takes the `count` entries that were read before, then reads on until the queue is empty or the outputs full.

    Returns (tickets, immediates, events, code): code is -EAGAIN when empty, positive when there may be more. Events are
    completed messages, as pairs of slot (from the first message slot on) and length.
    """
    capacity = entries.shape[0] // _ENTRY_WORDS
    most = min(tickets.shape[0], imms.shape[0], events.shape[0] // 2) - capacity
    writes = owner.shape[0]
    n_tickets = 0
    n_imms = 0
    n_events = 0
    code = count
    if code == 0:
        code = call_read(read, cq, entries_address, capacity)
    while code > 0:
        for i in range(code):
            # First by the flag: a completion of the peer's write may carry a stale context of our own.
            if entries[_ENTRY_WORDS * i + 1] & _WRITE_BITS == _REMOTE_WRITE:
                imms[n_imms] = entries[_ENTRY_WORDS * i + 4] & 0xFFFFFFFF
                n_imms += 1
                continue
            slot = (entries[_ENTRY_WORDS * i] - contexts) // _CONTEXT_BYTES
            if 0 <= slot < writes:
                if owner[slot] == 0:
                    continue
                tickets[n_tickets] = owner[slot]
                owner[slot] = 0
                n_tickets += 1
                free[top[0]] = slot
                top[0] += 1
            elif writes <= slot < slots:
                events[2 * n_events] = slot - writes
                events[2 * n_events + 1] = entries[_ENTRY_WORDS * i + 2]
                n_events += 1
        if n_tickets > most or n_imms > most or n_events > most:
            break
        code = call_read(read, cq, entries_address, capacity)
    return n_tickets, n_imms, n_events, code


def rest(
    queues: Any,
    queues_address: int,
    capacity: int,
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
) -> tuple[int, int, int]:
    """Polls all queues, for `spin_ns` without a break and then between sleeps that double up to `longest_ns`.

    `queues` is `(queues, 5)`: read, cq, buffer, fabric and trywait of each (0: it cannot be waited for). `polls` are
    what ppoll takes: `fixed` descriptors, of which any ends the rest, and one per queue, or -1. With `sleep_ns` 0 it
    ends instead of sleeping. Returns (queue, code, next sleep): the first queue that has something, its entries left in
    its buffer; queue -1 after `total_ns` of sleep, -2 when it was woken.
    """
    slept = 0
    refused = 0
    spun_until = 0
    while True:
        for i in range(queues.shape[0]):
            code = call_read(queues[i, 0], queues[i, 1], queues[i, 2], capacity)
            if code != _EAGAIN and code != 0:
                return i, code, sleep_ns
        if woken[0] != 0:
            return -2, 0, sleep_ns
        if spin_ns > 0:
            call_clock(clock, _MONOTONIC, timespec_address)
            now = timespec[0] * 1000000000 + timespec[1]
            if spun_until == 0:
                spun_until = now + spin_ns
            if now < spun_until:
                continue
            spin_ns = 0
        if slept >= total_ns or sleep_ns == 0:
            return -1, 0, sleep_ns
        pause = sleep_ns
        for i in range(queues.shape[0]):
            if queues[i, 4] != 0 and call_trywait(queues[i, 4], queues[i, 3], queues_address + 40 * i + 8, 1) != 0:
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
                    return -2, 0, sleep_ns
        slept += max(pause, 1000)
        sleep_ns = min(2 * sleep_ns, longest_ns)
