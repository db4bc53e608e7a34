"""The transport over UCX, through libucp by ctypes: one-sided puts, a flush, and an active message as the immediate.

Why not a Python binding: ucx-py was archived in September 2025; the Python path of its successor, ucxx, offers tagged
and active messages and streams, no put, and was measured at under 0.3 GB/s between two processes. libucp itself has
everything that the protocol needs, comes with the `mpich` wheel, with Linux distributions and with `libucx-cu12`, and
its calls cost the same few nanoseconds from compiled loops as libfabric's.

How it maps onto `transport.api`
--------------------------------
- A link is one `ucp_worker` with one endpoint: closing it closes its sockets, so it ends that peer's access alone.
- Blocks are put in batches. When the flush that follows a batch has completed, its payload is in place, and one active
  message tells the receiver the immediate and how many writes it stands for: counters count as over libfabric. A batch
  is complete once that message is on its way.
- UCX's tcp places a put where the sender says, without looking at its key. So nothing is put before the peer has
  answered a greeting with the identity that its address promised, and a key is refused here, by the sender, unless it
  was made for this link and is undamaged. That keeps out mistakes and old addresses; it does not keep out malice.
- UCX spreads a link over several network devices by itself: an address has one name, whatever the number of NICs.
- On `tcp` the receiver's own process places every byte, while it polls: nothing lands once the link is closed. Where
  the sender (cma, posix, sysv, xpmem) or a NIC places it, that is not shown, and `UcxTransport.revokes` is False.

GPU memory needs a UCX with CUDA, which the extra `pdserve[ucx-cuda]` brings as `libucx-cu12`, and transports that reach
it: `tls=("rc", "tcp", "cuda_copy", "cuda_ipc")`. None of these has run on hardware yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transport.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]


def __getattr__(name: str) -> Any:
    """Imported on first use: a process that needs no UCX loads nothing of it."""
    if name == "UcxTransport":
        from transport.ucx.transport import UcxTransport

        return UcxTransport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
