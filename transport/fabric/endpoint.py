"""An endpoint with an address vector and a completion queue of its own: one NIC's end of a link."""

from __future__ import annotations

import ctypes as c
import errno
from contextlib import suppress

from transport.errors import FabricError
from transport.fabric import abi, calls
from transport.fabric.domain import Domain, local_names

_ENABLE = "fi_enable"
_TOO_DEEP = " (its queue may be deeper than the NIC has: it grows with FI_UNIVERSE_SIZE, lower that)"


class Endpoint:
    """An endpoint with an address vector and a completion queue of its own. Not thread-safe.

    `ep` and `cq` are what the posting loops take; 0 once closed. `wait_fd` becomes readable when the queue has
    something, provided that `trywait` of `fabric` has agreed to the wait; -1 where the provider has no such thing.
    """

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self.av = self.cq = self.ep = 0
        self.name = b""
        handle, opened = domain.handle, domain.opened
        av_attr = abi.fi_av_attr(type=domain.av_type, count=1)
        self.fabric, self.trywait, self.wait_fd = domain.fabric, 0, -1
        try:
            self.av = opened("fi_av_open", lambda out: calls.open_av(handle, av_attr, out))
            self._open_queue()
            self.ep = opened("fi_endpoint", lambda out: calls.open_endpoint(handle, domain.info, out))
            self._check("fi_ep_bind(av)", calls.bind(self.ep, self.av, 0))
            self._check("fi_ep_bind(cq)", calls.bind(self.ep, self.cq, abi.FI_TRANSMIT | abi.FI_RECV))
            self._check(_ENABLE, calls.enable(self.ep))
            code, self.name = calls.name_of(self.ep)
            self._check("fi_getname", code)
            local_names.add(self.name)
        except FabricError:
            self.close()
            raise
        self.writedata = calls.writedata_address(self.ep)
        self.cq_read = calls.cq_read_address(self.cq)

    def insert(self, name: bytes) -> int:
        """Makes a peer's address usable: what writes take as `dest`. Raises FabricError, ValueError."""
        profile = self._domain.profile
        if not profile.within_process and name in local_names:
            raise ValueError(
                f"{profile.name} connects different processes only: within one, use the loopback transport or tcp"
            )
        out = c.c_uint64(abi.FI_ADDR_NOTAVAIL)
        count = calls.insert_address(self.av, name, out)
        if count != 1:
            raise self._domain.error("fi_av_insert", count or errno.EINVAL)
        return out.value

    def close_ep(self) -> None:
        """Ends the endpoint; the completion queue stays readable for what it flushed. Idempotent.

        Raises FabricError if it may still be open to a peer.
        """
        if self.ep:
            local_names.discard(self.name)
            error = self._domain.close_object("fi_close(ep)", self.ep)
            self.ep = 0
            if error is not None:
                raise error

    def close(self) -> None:
        """Idempotent."""
        with suppress(FabricError):  # logged; `close_ep` comes first where it matters
            self.close_ep()
        for call, name in (("fi_close(cq)", "cq"), ("fi_close(av)", "av")):
            if getattr(self, name):
                self._domain.close_object(call, getattr(self, name))
                setattr(self, name, 0)

    def _open_queue(self) -> None:
        """With a descriptor to wait for where the profile says so and the library has one."""
        domain = self._domain
        for wait in (abi.FI_WAIT_FD, abi.FI_WAIT_NONE) if domain.profile.wait == "fd" else (abi.FI_WAIT_NONE,):
            attr = abi.fi_cq_attr(size=domain.profile.cq_depth, format=abi.FI_CQ_FORMAT_DATA, wait_obj=wait)
            self.cq = domain.opened("fi_cq_open", lambda out, attr=attr: calls.open_cq(domain.handle, attr, out))
            if wait == abi.FI_WAIT_NONE:
                return
            code, self.wait_fd = calls.wait_fd(self.cq)
            if not code:
                self.trywait = calls.trywait_address(domain.fabric)
                return
            domain.close_object("fi_close(cq)", self.cq)
            self.cq, self.wait_fd = 0, -1

    def _check(self, call: str, code: int) -> None:
        if call == _ENABLE and code == -errno.EINVAL and self._domain.profile.reach == "rdma":
            call += _TOO_DEEP
        self._domain.check(call, code)
