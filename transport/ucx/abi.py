"""libucp's structs and constants, as far as they are used. Field masks say which fields count, so tails may grow.

Source: ucp/api/ucp.h, ucp/api/ucp_def.h and ucs/type/status.h of UCX 1.13 to 1.23; compared with the headers by a test.
"""

from __future__ import annotations

import ctypes as c

API_VERSION = (1, 10)
"""The oldest whose functions are all that is called here."""

UCP_PARAM_FIELD_FEATURES = 1 << 0
UCP_PARAM_FIELD_MT_WORKERS_SHARED = 1 << 5
UCP_PARAM_FIELD_NAME = 1 << 8
UCP_FEATURE_RMA = 1 << 1
UCP_FEATURE_WAKEUP = 1 << 4
UCP_FEATURE_AM = 1 << 6

UCP_ATTR_FIELD_MEMORY_TYPES = 1 << 2

UCP_WORKER_PARAM_FIELD_THREAD_MODE = 1 << 0
UCP_WORKER_PARAM_FIELD_FLAGS = 1 << 5
UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK = 1 << 0
UCS_THREAD_MODE_SERIALIZED = 1

UCP_EP_PARAM_FIELD_REMOTE_ADDRESS = 1 << 0
UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE = 1 << 1
UCP_EP_PARAM_FIELD_ERR_HANDLER = 1 << 2
UCP_ERR_HANDLING_MODE_PEER = 1
UCP_EP_CLOSE_FLAG_FORCE = 1 << 0

UCP_MEM_MAP_PARAM_FIELD_ADDRESS = 1 << 0
UCP_MEM_MAP_PARAM_FIELD_LENGTH = 1 << 1
UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE = 1 << 4
UCS_MEMORY_TYPE_HOST = 0
UCS_MEMORY_TYPE_CUDA = 1

UCP_AM_HANDLER_PARAM_FIELD_ID = 1 << 0
UCP_AM_HANDLER_PARAM_FIELD_FLAGS = 1 << 1
UCP_AM_HANDLER_PARAM_FIELD_CB = 1 << 2
UCP_AM_HANDLER_PARAM_FIELD_ARG = 1 << 3
UCP_AM_FLAG_WHOLE_MSG = 1 << 0
UCP_AM_SEND_FLAG_REPLY = 1 << 0
UCP_AM_SEND_FLAG_EAGER = 1 << 1
UCP_AM_RECV_ATTR_FIELD_REPLY_EP = 1 << 0
UCP_AM_RECV_ATTR_FLAG_RNDV = 1 << 17

UCP_OP_ATTR_FIELD_FLAGS = 1 << 4
UCP_OP_ATTR_FIELD_MEMORY_TYPE = 1 << 6
UCP_OP_ATTR_FIELD_MEMH = 1 << 8

UCS_OK = 0
UCS_INPROGRESS = 1
UCS_ERR_INVALID_PARAM = -5
UCS_ERR_UNREACHABLE = -6
UCS_ERR_NO_DEVICE = -14
UCS_ERR_BUSY = -15
UCS_ERR_CANCELED = -16
UCS_ERR_TIMED_OUT = -20
UCS_ERR_UNSUPPORTED = -22
UCS_ERR_REJECTED = -23
UCS_ERR_NOT_CONNECTED = -24
UCS_ERR_CONNECTION_RESET = -25
UCS_ERR_FIRST_LINK_FAILURE = -40
UCS_ERR_LAST_ENDPOINT_FAILURE = -89
UCS_ERR_LAST = -100

status_t = c.c_int8
"""`ucs_status_t`: a packed enum."""

ON_MESSAGE = c.CFUNCTYPE(
    status_t, c.c_int64, c.c_int64, c.c_int64, c.c_int64, c.c_int64, c.c_int64
)  # argument, header, its length, data, its length, parameters
ON_ERROR = c.CFUNCTYPE(None, c.c_int64, c.c_int64, status_t)  # argument, endpoint, status


class ucp_params(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("features", c.c_uint64),
        ("request_size", c.c_size_t),
        ("request_init", c.c_void_p),
        ("request_cleanup", c.c_void_p),
        ("tag_sender_mask", c.c_uint64),
        ("mt_workers_shared", c.c_int),
        ("estimated_num_eps", c.c_size_t),
        ("estimated_num_ppn", c.c_size_t),
        ("name", c.c_char_p),
    ]


class ucp_context_attr(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("request_size", c.c_size_t),
        ("thread_mode", c.c_int),
        ("memory_types", c.c_uint64),
        ("tail", c.c_uint8 * 256),
    ]


class ucp_worker_params(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("thread_mode", c.c_int),
        ("cpu_mask", c.c_uint64 * 16),
        ("events", c.c_uint),
        ("user_data", c.c_void_p),
        ("event_fd", c.c_int),
        ("flags", c.c_uint64),
        ("name", c.c_char_p),
        ("am_alignment", c.c_size_t),
        ("client_id", c.c_uint64),
    ]


class ucp_err_handler(c.Structure):
    _fields_ = [("cb", c.c_void_p), ("arg", c.c_void_p)]


class ucs_sock_addr(c.Structure):
    _fields_ = [("addr", c.c_void_p), ("addrlen", c.c_uint32)]


class ucp_ep_params(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("address", c.c_char_p),
        ("err_mode", c.c_int),
        ("err_handler", ucp_err_handler),
        ("user_data", c.c_void_p),
        ("flags", c.c_uint),
        ("sockaddr", ucs_sock_addr),
        ("conn_request", c.c_void_p),
        ("name", c.c_char_p),
        ("local_sockaddr", ucs_sock_addr),
    ]


class ucp_mem_map_params(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("address", c.c_void_p),
        ("length", c.c_size_t),
        ("flags", c.c_uint),
        ("prot", c.c_uint),
        ("memory_type", c.c_int),
        ("tail", c.c_uint8 * 32),
    ]


class ucp_am_handler_param(c.Structure):
    _fields_ = [
        ("field_mask", c.c_uint64),
        ("id", c.c_uint),
        ("flags", c.c_uint32),
        ("cb", c.c_void_p),
        ("arg", c.c_void_p),
    ]


class ucp_am_recv_param(c.Structure):
    _fields_ = [("recv_attr", c.c_uint64), ("reply_ep", c.c_void_p)]


class ucp_request_param_t(c.Structure):
    _fields_ = [
        ("op_attr_mask", c.c_uint32),
        ("flags", c.c_uint32),
        ("request", c.c_void_p),
        ("cb", c.c_void_p),
        ("datatype", c.c_uint64),
        ("user_data", c.c_void_p),
        ("reply_buffer", c.c_void_p),
        ("memory_type", c.c_int),
        ("recv_info", c.c_void_p),
        ("memh", c.c_void_p),
        ("tail", c.c_uint8 * 64),
    ]


_P, _I, _U, _Z, _S = c.c_void_p, c.c_int, c.c_uint, c.c_size_t, status_t
_REF = c.c_void_p  # a pointer that is filled

PROTOTYPES: dict[str, tuple[object, list[object]]] = {
    "ucp_get_version": (None, [_REF, _REF, _REF]),
    "ucp_config_read": (_S, [c.c_char_p, c.c_char_p, _REF]),
    "ucp_config_modify": (_S, [_P, c.c_char_p, c.c_char_p]),
    "ucp_config_release": (None, [_P]),
    "ucp_init_version": (_S, [_U, _U, _REF, _P, _REF]),
    "ucp_context_query": (_S, [_P, _REF]),
    "ucp_cleanup": (None, [_P]),
    "ucp_worker_create": (_S, [_P, _REF, _REF]),
    "ucp_worker_destroy": (None, [_P]),
    "ucp_worker_get_address": (_S, [_P, _REF, _REF]),
    "ucp_worker_release_address": (None, [_P, _P]),
    "ucp_worker_get_efd": (_S, [_P, _REF]),
    "ucp_worker_arm": (_S, [_P]),
    "ucp_worker_progress": (_U, [_P]),
    "ucp_worker_set_am_recv_handler": (_S, [_P, _REF]),
    "ucp_ep_create": (_S, [_P, _REF, _REF]),
    "ucp_ep_close_nbx": (c.c_int64, [_P, _REF]),
    "ucp_ep_flush_nbx": (c.c_int64, [_P, _P]),
    "ucp_mem_map": (_S, [_P, _REF, _REF]),
    "ucp_mem_unmap": (_S, [_P, _P]),
    "ucp_rkey_pack": (_S, [_P, _P, _REF, _REF]),
    "ucp_rkey_buffer_release": (None, [_P]),
    "ucp_ep_rkey_unpack": (_S, [_P, c.c_char_p, _REF]),
    "ucp_rkey_destroy": (None, [_P]),
    "ucp_put_nbx": (c.c_int64, [_P, _P, _Z, c.c_uint64, _P, _P]),
    "ucp_am_send_nbx": (c.c_int64, [_P, _U, _P, _Z, _P, _Z, _P]),
    "ucp_request_check_status": (_S, [_P]),
    "ucp_request_free": (None, [_P]),
    "ucs_status_string": (c.c_char_p, [_S]),
}
"""Result and argument types of the functions that are called. A request comes back as 0 (done), a status, or itself."""
