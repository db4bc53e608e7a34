"""The loops that post writes and drain completion queues.

Plain functions over integers and int64 arrays. `posting.py` binds the foreign calls, which are globals here, and runs
this same source either compiled by numba (without the GIL) or interpreted, with the calls made by ctypes.

`slots`, of which a lane has one per write it may have outstanding: `owner[slot]` is the ticket of the transfer that
holds it; `free[:top[0]]` is the stack of free slots. A slot's context is `contexts + 64 * slot`, memory that some
providers write to while the operation lasts.
"""

from __future__ import annotations

from typing import Any

call_write: Any = None
call_read: Any = None
call_ppoll: Any = None

_CONTEXT_BYTES = 64
_ENTRY_WORDS = 5
_REMOTE_WRITE = 1 << 13
_EAGAIN = -11


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


def drain(
    read: int,
    cq: int,
    entries: Any,
    entries_address: int,
    count: int,
    contexts: int,
    owner: Any,
    free: Any,
    top: Any,
    tickets: Any,
    imms: Any,
) -> tuple[int, int, int]:
    """Takes the `count` entries that were read before, then reads on until the queue is empty or the outputs full.

    Returns (tickets, immediates, code): code is -EAGAIN when empty, positive when there may be more.
    """
    capacity = entries.shape[0] // _ENTRY_WORDS
    n_tickets = 0
    n_imms = 0
    code = count
    if code == 0:
        code = call_read(read, cq, entries_address, capacity)
    while code > 0:
        for i in range(code):
            if entries[_ENTRY_WORDS * i + 1] & _REMOTE_WRITE:
                imms[n_imms] = entries[_ENTRY_WORDS * i + 4] & 0xFFFFFFFF
                n_imms += 1
            else:
                slot = (entries[_ENTRY_WORDS * i] - contexts) // _CONTEXT_BYTES
                if 0 <= slot < owner.shape[0]:
                    tickets[n_tickets] = owner[slot]
                    n_tickets += 1
                    free[top[0]] = slot
                    top[0] += 1
        if n_tickets + capacity > tickets.shape[0] or n_imms + capacity > imms.shape[0]:
            break
        code = call_read(read, cq, entries_address, capacity)
    return n_tickets, n_imms, code


def rest(
    reads: Any,
    cqs: Any,
    buffers: Any,
    capacity: int,
    spins: int,
    sleep_ns: int,
    longest_ns: int,
    total_ns: int,
    ppoll: int,
    pollfd: Any,
    pollfd_address: int,
    timespec: Any,
    timespec_address: int,
) -> tuple[int, int, int]:
    """Polls all queues, `spins` times at once and then between sleeps that double up to `longest_ns`.

    Returns (queue, code, next sleep): the first queue that has something, its entries left in its buffer; queue -1
    after `total_ns` of sleep, -2 when the event descriptor woke it.
    """
    slept = 0
    while True:
        for i in range(cqs.shape[0]):
            code = call_read(reads[i], cqs[i], buffers[i], capacity)
            if code != _EAGAIN and code != 0:
                return i, code, sleep_ns
        if spins > 0:
            spins -= 1
            continue
        if slept >= total_ns:
            return -1, 0, sleep_ns
        pollfd[0] = pollfd[0] & 0xFFFFFFFFFFFF
        timespec[0] = sleep_ns // 1000000000
        timespec[1] = sleep_ns % 1000000000
        if call_ppoll(ppoll, pollfd_address, 1, timespec_address, 0) > 0:
            return -2, 0, sleep_ns
        slept += sleep_ns
        sleep_ns = min(2 * sleep_ns, longest_ns)
