"""One link's UCX worker and its endpoint: opened, directed at a peer, closed. Runs on the worker thread only."""

from __future__ import annotations

import ctypes as c
import logging
import secrets
import struct
import time
import zlib

import numpy as np

from transport.errors import DescriptorMismatch, FabricError
from transport.ucx import abi, calls, loops
from transport.ucx.binding import Loops
from transport.ucx.context import Context
from transport.ucx.posting import Arrivals, Poster, eager

log = logging.getLogger(__name__)

_NAME = struct.Struct("<q")
_KEY = struct.Struct("<qI")
"""The link's identity, checksum of the packed key that follows."""
_HEADER = struct.Struct("<qqq")
_FLUSH_S = 0.05
"""How long a link that closes in good order waits for what is buffered to reach the socket."""
_CLOSE_S = 1.0
"""How long UCX may take to give back what it still holds of a closed endpoint."""


class Channel:
    """Not thread-safe. Raises FabricError; nothing is left open then."""

    def __init__(self, context: Context, bound: Loops) -> None:
        self._context, self._loops, self._lib = context, bound, context.library.lib
        self._identity = secrets.randbits(62) | 1
        self._peer = 0
        self._arguments: list[object] = []
        self._sends: dict[int, object] = {}
        self._rkeys: dict[bytes, int] = {}
        self.arrivals = Arrivals(context.table, self._identity)
        self.worker = self.ep = 0
        self.event_fd = -1
        self.peer_name = ""
        try:
            self._open()
        except FabricError:
            self.close()
            raise
        self.poster = Poster(bound, context.table, self.worker, self.arrivals.block, 1)

    def direct(self, name: bytes, depth: int, peer_name: str) -> None:
        """Makes the endpoint towards the link of that name, and greets it. Raises FabricError, DescriptorMismatch."""
        if len(name) <= _NAME.size:
            raise DescriptorMismatch(f"the peer's address has a name of {len(name)} bytes: it is damaged")
        (peer,) = _NAME.unpack_from(name)
        self.peer_name = peer_name
        fields = (
            abi.UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
            | abi.UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
            | abi.UCP_EP_PARAM_FIELD_ERR_HANDLER
        )
        address = c.create_string_buffer(name[_NAME.size :])
        params = abi.ucp_ep_params(
            field_mask=fields,
            address=c.cast(address, c.c_char_p),
            err_mode=abi.UCP_ERR_HANDLING_MODE_PEER,
            err_handler=abi.ucp_err_handler(cb=self._loops.on_error, arg=self.arrivals.block),
        )
        out = c.c_void_p()
        self._check("ucp_ep_create", self._lib.ucp_ep_create(self.worker, c.byref(params), c.byref(out)))
        self.ep, self._peer = out.value or 0, peer
        self.poster = Poster(self._loops, self._context.table, self.worker, self.arrivals.block, depth)
        self.poster.direct(self.ep, peer)
        try:
            self._check("ucp_am_send_nbx", self.send(loops.HELLO, flags=abi.UCP_AM_SEND_FLAG_REPLY))
        except FabricError:
            self.close_ep(flush=False)
            raise

    def send(self, kind: int, data: bytes = b"", flags: int = 0) -> int:
        """Sends a frame to the peer; 0 or a negative status."""
        header = np.frombuffer(bytearray(_HEADER.pack(kind, self._peer, self._identity)), np.uint8)
        body = np.frombuffer(bytearray(data), np.uint8)
        param = eager(flags)
        request = self._lib.ucp_am_send_nbx(
            self.ep, loops.FRAME_ID, header.ctypes.data, len(header), body.ctypes.data, len(data), c.addressof(param)
        )
        if calls.is_error(request):
            return int(request)
        if request:
            self._sends[request] = (header, body, param)
        return 0

    def settle_sends(self) -> int:
        """Forgets frames that have gone out; 0, or the status of one that has not."""
        failed = 0
        for request in list(self._sends):
            status = self._lib.ucp_request_check_status(request)
            if status != abi.UCS_INPROGRESS:
                self._lib.ucp_request_free(request)
                del self._sends[request]
                failed = failed or min(status, 0)
        return failed

    @property
    def sending(self) -> int:
        """Frames that UCX has not sent yet."""
        return len(self._sends)

    def seal(self, packed: bytes) -> bytes:
        """A key of this link: what `unseal` of its peer takes."""
        return _KEY.pack(self._identity, zlib.crc32(packed)) + packed

    def unseal(self, key: bytes) -> int:
        """The handle of a key of the peer. Raises FabricError if it is damaged or of another link."""
        handle = self._rkeys.get(key)
        if handle is not None:
            return handle
        packed = key[_KEY.size :]
        if len(key) <= _KEY.size or _KEY.unpack_from(key) != (self._peer, zlib.crc32(packed)):
            raise self.error("ucp_ep_rkey_unpack (the key is damaged, or of another link)", abi.UCS_ERR_INVALID_PARAM)
        out = c.c_void_p()
        self._check("ucp_ep_rkey_unpack", self._lib.ucp_ep_rkey_unpack(self.ep, packed, c.byref(out)))
        self._rkeys[key] = out.value or 0
        return self._rkeys[key]

    def close_ep(self, *, flush: bool) -> None:
        """Ends the endpoint; `flush` lets out first what is buffered. Nothing of it is under way then. Idempotent."""
        if not self.ep:
            return
        ep, self.ep = self.ep, 0
        if flush:
            self._finish(self._lib.ucp_ep_flush_nbx(ep, self.poster.plain), _FLUSH_S)
        param = abi.ucp_request_param_t(op_attr_mask=abi.UCP_OP_ATTR_FIELD_FLAGS, flags=abi.UCP_EP_CLOSE_FLAG_FORCE)
        self._finish(self._lib.ucp_ep_close_nbx(ep, c.byref(param)), _CLOSE_S)
        deadline = time.monotonic() + _CLOSE_S
        while not self._discard() and time.monotonic() < deadline:
            self._lib.ucp_worker_progress(self.worker)
        for handle in self._rkeys.values():
            self._lib.ucp_rkey_destroy(handle)
        self._rkeys.clear()

    def close(self) -> None:
        """Closes the sockets: from here on nobody writes to what was exposed. Idempotent."""
        self.close_ep(flush=False)
        if self.worker:
            self._lib.ucp_worker_destroy(self.worker)
            self.worker = 0
        self._sends.clear()

    def error(self, call: str, status: int) -> FabricError:
        return calls.ucx_error(self._context.library, call, status, self.peer_name, self._context.nic)

    def _open(self) -> None:
        params = abi.ucp_worker_params(
            field_mask=abi.UCP_WORKER_PARAM_FIELD_THREAD_MODE | abi.UCP_WORKER_PARAM_FIELD_FLAGS,
            thread_mode=abi.UCS_THREAD_MODE_SERIALIZED,
            flags=abi.UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK,
        )
        out = c.c_void_p()
        status = self._lib.ucp_worker_create(self._context.handle, c.byref(params), c.byref(out))
        self._check("ucp_worker_create", status)
        self.worker = out.value or 0
        descriptor = c.c_int(-1)
        self._check("ucp_worker_get_efd", self._lib.ucp_worker_get_efd(self.worker, c.byref(descriptor)))
        self.event_fd = descriptor.value
        for which, function in ((loops.IMM_ID, self._loops.on_immediate), (loops.FRAME_ID, self._loops.on_frame)):
            self._listen(which, function)
        self.name = _NAME.pack(self._identity) + self._address()

    def _listen(self, which: int, function: int) -> None:
        fields = (
            abi.UCP_AM_HANDLER_PARAM_FIELD_ID
            | abi.UCP_AM_HANDLER_PARAM_FIELD_FLAGS
            | abi.UCP_AM_HANDLER_PARAM_FIELD_CB
            | abi.UCP_AM_HANDLER_PARAM_FIELD_ARG
        )
        params = abi.ucp_am_handler_param(
            field_mask=fields, id=which, flags=abi.UCP_AM_FLAG_WHOLE_MSG, cb=function, arg=self.arrivals.block
        )
        status = self._lib.ucp_worker_set_am_recv_handler(self.worker, c.byref(params))
        self._check("ucp_worker_set_am_recv_handler", status)

    def _address(self) -> bytes:
        out, size = c.c_void_p(), c.c_size_t()
        status = self._lib.ucp_worker_get_address(self.worker, c.byref(out), c.byref(size))
        self._check("ucp_worker_get_address", status)
        address = c.string_at(out.value or 0, size.value)
        self._lib.ucp_worker_release_address(self.worker, out)
        return address

    def _finish(self, request: int, longest_s: float) -> None:
        """Polls until the request is done, or gives it up."""
        if not request or calls.is_error(request):
            return
        deadline = time.monotonic() + longest_s
        while self._lib.ucp_request_check_status(request) == abi.UCS_INPROGRESS and time.monotonic() < deadline:
            self._lib.ucp_worker_progress(self.worker)
        self._lib.ucp_request_free(request)

    def _discard(self) -> bool:
        """Frees the requests of a closed endpoint; False if UCX is not done with some."""
        self.settle_sends()
        return self.poster.discard() and not self._sends

    def _check(self, call: str, status: int) -> None:
        calls.check(self._context.library, call, status, self.peer_name, self._context.nic)
