"""libfabric's binary interface: the structs, ops tables and constants that are used, and no others.

One layout fits 1.17 to 2.x: later versions only grew the tails of some structs, so infos are allocated by the library
(`fi_dupinfo(NULL)`) and buffers that it fills have room to spare. Source: <rdma/fabric.h>, fi_domain.h, fi_endpoint.h,
fi_eq.h, fi_rma.h, fi_cm.h; tests/transport/test_abi.py compares with the headers of this machine.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

FI_MSG = 1 << 1
FI_RMA = 1 << 2
FI_WRITE = 1 << 9
FI_SEND = 1 << 11
FI_RECV = 1 << 10
FI_TRANSMIT = FI_SEND
FI_REMOTE_WRITE = 1 << 13
FI_REMOTE_CQ_DATA = 1 << 17
FI_SOURCE = 1 << 57
FI_HMEM = 1 << 47
FI_CONTEXT = 1 << 59
FI_CONTEXT2 = 1 << 52

FI_MR_LOCAL = 1 << 2
FI_MR_VIRT_ADDR = 1 << 4
FI_MR_ALLOCATED = 1 << 5
FI_MR_PROV_KEY = 1 << 6
FI_MR_ENDPOINT = 1 << 9
FI_MR_HMEM = 1 << 10
FI_MR_DMABUF = 1 << 40
FI_HMEM_SYSTEM = 0
FI_HMEM_CUDA = 1

FI_EP_RDM = 3
FI_THREAD_DOMAIN = 3
FI_PROGRESS_AUTO = 1
FI_PROGRESS_MANUAL = 2
FI_CQ_FORMAT_DATA = 3
FI_WAIT_NONE = 0
FI_WAIT_FD = 3
FI_GETWAIT = 5
FI_ENABLE = 6
FI_LINK_DOWN = 1
FI_SOCKADDR_IN = 2
FI_SOCKADDR_IN6 = 3
FI_SOCKADDR_IB = 4
FI_ADDR_STR = 9
FI_ADDR_EFA = 12
FI_ADDR_NOTAVAIL = 2**64 - 1
FI_ADDR_UNSPEC = 2**64 - 1

FI_EAGAIN = 11
FI_ENOENT = 2
FI_ENODATA = 61
FI_ECANCELED = 125
FI_ENOKEY = 266
FI_EAVAIL = 259
FI_ETRUNC = 265

CONTEXT_BYTES = 64
"""sizeof(struct fi_context2): what a provider may use behind an operation's context pointer."""
CQ_ENTRY_WORDS = 5
"""sizeof(struct fi_cq_data_entry) in 64-bit words: op_context, flags, len, buf, data."""

_P = c.c_void_p
_SSIZE = c.c_ssize_t
_U64 = c.c_uint64


class fi_ops(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("close", c.CFUNCTYPE(c.c_int, _P)),
        ("bind", c.CFUNCTYPE(c.c_int, _P, _P, _U64)),
        ("control", c.CFUNCTYPE(c.c_int, _P, c.c_int, _P)),
    ]


class fid(c.Structure):
    _fields_ = [("fclass", c.c_size_t), ("context", _P), ("ops", c.POINTER(fi_ops))]


class fi_tx_attr(c.Structure):
    _fields_ = [
        ("caps", _U64),
        ("mode", _U64),
        ("op_flags", _U64),
        ("msg_order", _U64),
        ("comp_order", _U64),
        ("inject_size", c.c_size_t),
        ("size", c.c_size_t),
        ("iov_limit", c.c_size_t),
        ("rma_iov_limit", c.c_size_t),
        ("tclass", c.c_uint32),
    ]


class fi_rx_attr(c.Structure):
    _fields_ = [
        ("caps", _U64),
        ("mode", _U64),
        ("op_flags", _U64),
        ("msg_order", _U64),
        ("comp_order", _U64),
        ("total_buffered_recv", c.c_size_t),
        ("size", c.c_size_t),
        ("iov_limit", c.c_size_t),
    ]


class fi_ep_attr(c.Structure):
    _fields_ = [
        ("type", c.c_int),
        ("protocol", c.c_uint32),
        ("protocol_version", c.c_uint32),
        ("max_msg_size", c.c_size_t),
        ("msg_prefix_size", c.c_size_t),
        ("max_order_raw_size", c.c_size_t),
        ("max_order_war_size", c.c_size_t),
        ("max_order_waw_size", c.c_size_t),
        ("mem_tag_format", _U64),
        ("tx_ctx_cnt", c.c_size_t),
        ("rx_ctx_cnt", c.c_size_t),
        ("auth_key_size", c.c_size_t),
        ("auth_key", _P),
    ]


class fi_domain_attr(c.Structure):
    """Up to `mr_cnt`; later versions have a longer tail."""

    _fields_ = [
        ("domain", _P),
        ("name", _P),
        ("threading", c.c_int),
        ("control_progress", c.c_int),
        ("data_progress", c.c_int),
        ("resource_mgmt", c.c_int),
        ("av_type", c.c_int),
        ("mr_mode", c.c_int),
        ("mr_key_size", c.c_size_t),
        ("cq_data_size", c.c_size_t),
        ("cq_cnt", c.c_size_t),
        ("ep_cnt", c.c_size_t),
        ("tx_ctx_cnt", c.c_size_t),
        ("rx_ctx_cnt", c.c_size_t),
        ("max_ep_tx_ctx", c.c_size_t),
        ("max_ep_rx_ctx", c.c_size_t),
        ("max_ep_stx_ctx", c.c_size_t),
        ("max_ep_srx_ctx", c.c_size_t),
        ("cntr_cnt", c.c_size_t),
        ("mr_iov_limit", c.c_size_t),
        ("caps", _U64),
        ("mode", _U64),
        ("auth_key", _P),
        ("auth_key_size", c.c_size_t),
        ("max_err_data", c.c_size_t),
        ("mr_cnt", c.c_size_t),
    ]


class fi_fabric_attr(c.Structure):
    _fields_ = [
        ("fabric", _P),
        ("name", _P),
        ("prov_name", _P),
        ("prov_version", c.c_uint32),
        ("api_version", c.c_uint32),
    ]


class fi_device_attr(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("device_id", c.c_char_p),
        ("device_version", c.c_char_p),
        ("vendor_id", c.c_char_p),
        ("driver", c.c_char_p),
        ("firmware", c.c_char_p),
    ]


class fi_link_attr(c.Structure):
    _fields_ = [
        ("address", c.c_char_p),
        ("mtu", c.c_size_t),
        ("speed", c.c_size_t),
        ("state", c.c_int),
        ("network_type", c.c_char_p),
    ]


class fid_nic(c.Structure):
    """Absent (NULL) where the provider runs over no device of its own."""

    _fields_ = [
        ("fid", fid),
        ("device_attr", c.POINTER(fi_device_attr)),
        ("bus_attr", _P),
        ("link_attr", c.POINTER(fi_link_attr)),
        ("prov_attr", _P),
    ]


class fi_info(c.Structure):
    pass


fi_info._fields_ = [
    ("next", c.POINTER(fi_info)),
    ("caps", _U64),
    ("mode", _U64),
    ("addr_format", c.c_uint32),
    ("src_addrlen", c.c_size_t),
    ("dest_addrlen", c.c_size_t),
    ("src_addr", _P),
    ("dest_addr", _P),
    ("handle", _P),
    ("tx_attr", c.POINTER(fi_tx_attr)),
    ("rx_attr", c.POINTER(fi_rx_attr)),
    ("ep_attr", c.POINTER(fi_ep_attr)),
    ("domain_attr", c.POINTER(fi_domain_attr)),
    ("fabric_attr", c.POINTER(fi_fabric_attr)),
    ("nic", c.POINTER(fid_nic)),
]


TRYWAIT = c.CFUNCTYPE(c.c_int, _P, c.POINTER(_P), c.c_int)
"""fabric, fids, count: 0 if nothing has happened yet, so that waiting on their file descriptors is safe."""


class fi_ops_fabric(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("domain", c.CFUNCTYPE(c.c_int, _P, c.POINTER(fi_info), c.POINTER(_P), _P)),
        ("passive_ep", _P),
        ("eq_open", _P),
        ("wait_open", _P),
        ("trywait", TRYWAIT),
    ]


class fid_fabric(c.Structure):
    _fields_ = [("fid", fid), ("ops", c.POINTER(fi_ops_fabric)), ("api_version", c.c_uint32)]


class fi_av_attr(c.Structure):
    _fields_ = [
        ("type", c.c_int),
        ("rx_ctx_bits", c.c_int),
        ("count", c.c_size_t),
        ("ep_per_node", c.c_size_t),
        ("name", c.c_char_p),
        ("map_addr", _P),
        ("flags", _U64),
    ]


class fi_cq_attr(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("flags", _U64),
        ("format", c.c_int),
        ("wait_obj", c.c_int),
        ("signaling_vector", c.c_int),
        ("wait_cond", c.c_int),
        ("wait_set", _P),
    ]


class fi_ops_domain(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("av_open", c.CFUNCTYPE(c.c_int, _P, c.POINTER(fi_av_attr), c.POINTER(_P), _P)),
        ("cq_open", c.CFUNCTYPE(c.c_int, _P, c.POINTER(fi_cq_attr), c.POINTER(_P), _P)),
        ("endpoint", c.CFUNCTYPE(c.c_int, _P, c.POINTER(fi_info), c.POINTER(_P), _P)),
    ]


class iovec(c.Structure):
    _fields_ = [("iov_base", _P), ("iov_len", c.c_size_t)]


class fi_mr_dmabuf(c.Structure):
    """Since 1.20. What is registered starts at virtual address `base_addr` + `offset`."""

    _fields_ = [("fd", c.c_int), ("offset", _U64), ("len", c.c_size_t), ("base_addr", _P)]


class fi_mr_attr(c.Structure):
    """Up to `device`; `tail` is room for what later versions read, to be left zero."""

    _fields_ = [
        ("mr_iov", _P),
        ("iov_count", c.c_size_t),
        ("access", _U64),
        ("offset", _U64),
        ("requested_key", _U64),
        ("context", _P),
        ("auth_key_size", c.c_size_t),
        ("auth_key", _P),
        ("iface", c.c_int),
        ("device", _U64),
        ("tail", _U64 * 16),
    ]


class fi_ops_mr(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("reg", c.CFUNCTYPE(c.c_int, _P, _P, c.c_size_t, _U64, _U64, _U64, _U64, c.POINTER(_P), _P)),
        ("regv", _P),
        ("regattr", c.CFUNCTYPE(c.c_int, _P, c.POINTER(fi_mr_attr), _U64, c.POINTER(_P))),
    ]


class fid_domain(c.Structure):
    _fields_ = [("fid", fid), ("ops", c.POINTER(fi_ops_domain)), ("mr", c.POINTER(fi_ops_mr))]


class fid_mr(c.Structure):
    _fields_ = [("fid", fid), ("mem_desc", _P), ("key", _U64)]


class fi_ops_av(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("insert", c.CFUNCTYPE(c.c_int, _P, _P, c.c_size_t, c.POINTER(_U64), _U64, _P)),
    ]


class fid_av(c.Structure):
    _fields_ = [("fid", fid), ("ops", c.POINTER(fi_ops_av))]


class fi_cq_data_entry(c.Structure):
    _fields_ = [("op_context", _P), ("flags", _U64), ("len", c.c_size_t), ("buf", _P), ("data", _U64)]


class fi_cq_err_entry(c.Structure):
    """Up to `err_data_size`; `tail` is room for what later versions append."""

    _fields_ = [
        ("op_context", _P),
        ("flags", _U64),
        ("len", c.c_size_t),
        ("buf", _P),
        ("data", _U64),
        ("tag", _U64),
        ("olen", c.c_size_t),
        ("err", c.c_int),
        ("prov_errno", c.c_int),
        ("err_data", _P),
        ("err_data_size", c.c_size_t),
        ("tail", _U64 * 8),
    ]


class fi_ops_cq(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("read", c.CFUNCTYPE(_SSIZE, _P, _P, c.c_size_t)),
        ("readfrom", _P),
        ("readerr", c.CFUNCTYPE(_SSIZE, _P, c.POINTER(fi_cq_err_entry), _U64)),
        ("sread", _P),
        ("sreadfrom", _P),
        ("signal", _P),
        ("strerror", c.CFUNCTYPE(c.c_char_p, _P, c.c_int, _P, c.c_char_p, c.c_size_t)),
    ]


class fid_cq(c.Structure):
    _fields_ = [("fid", fid), ("ops", c.POINTER(fi_ops_cq))]


class fi_ops_cm(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("setname", _P),
        ("getname", c.CFUNCTYPE(c.c_int, _P, _P, c.POINTER(c.c_size_t))),
    ]


WRITEDATA = c.CFUNCTYPE(_SSIZE, _P, _P, c.c_size_t, _P, _U64, _U64, _U64, _U64, _P)
"""ep, buf, len, desc, data, dest_addr, addr, key, context."""


class fi_ops_rma(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("read", _P),
        ("readv", _P),
        ("readmsg", _P),
        ("write", _P),
        ("writev", _P),
        ("writemsg", _P),
        ("inject", _P),
        ("writedata", WRITEDATA),
        ("injectdata", _P),
    ]


RECV = c.CFUNCTYPE(_SSIZE, _P, _P, c.c_size_t, _P, _U64, _P)
"""ep, buf, len, desc, src_addr, context."""
SEND = c.CFUNCTYPE(_SSIZE, _P, _P, c.c_size_t, _P, _U64, _P)
"""ep, buf, len, desc, dest_addr, context."""


class fi_ops_msg(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("recv", RECV),
        ("recvv", _P),
        ("recvmsg", _P),
        ("send", SEND),
        ("sendv", _P),
        ("sendmsg", _P),
        ("inject", _P),
        ("senddata", _P),
        ("injectdata", _P),
    ]


class fid_ep(c.Structure):
    _fields_ = [
        ("fid", fid),
        ("ops", _P),
        ("cm", c.POINTER(fi_ops_cm)),
        ("msg", c.POINTER(fi_ops_msg)),
        ("rma", c.POINTER(fi_ops_rma)),
    ]


def address_of(function: Any) -> int:
    """The address behind a function-pointer field of an ops table."""
    return c.cast(function, c.c_void_p).value or 0
