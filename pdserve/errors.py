"""Errors that a user of pdserve can meet.

PdserveError
├── ConfigError            a setting is unknown, of a wrong type, or impossible in combination
├── ModelError             a model directory cannot be read or is of an unsupported kind
├── RequestError           a request cannot be served as it is (HTTP 400)
│   └── ContextLengthError     prompt + max_tokens exceeds the context
├── OutOfPages             the page pool cannot give the pages asked for now
├── MeetingRefused         two nodes disagree on model, dtype, page size, layout or protocol
├── RankLost               a rank of a node died, or did not come to a collective in time
├── HandoffFailed          a handoff ended without its pages (rejection, deadline, peer lost)
├── ClusterTooSmall        the cluster's hosts cannot hold the nodes of a deployment
└── NoNodeAvailable        no ready node can take the request (HTTP 503)
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of everything that pdserve raises on purpose."""


class ConfigError(PdserveError):
    """A setting is unknown, of a wrong type, or impossible; the message names key, value and what is allowed."""


class ModelError(PdserveError):
    """A model cannot be loaded; the message names the path and what was expected there."""


class RequestError(PdserveError):
    """The request cannot be served as it is; `param` names the parameter at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt (and what was asked to follow it) does not fit the context."""


class OutOfPages(PdserveError):
    """The pool has fewer free pages than were asked for; try again when a request has ended."""


class MeetingRefused(PdserveError):
    """Two nodes cannot work together; the message names the field and both values."""


class RankLost(PdserveError):
    """A collective did not end: a rank of the group died, or did not come in time."""


class HandoffFailed(PdserveError):
    """A handoff ended without its pages; `retryable` says whether another prefill node may do it."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class ClusterTooSmall(PdserveError):
    """The cluster's hosts cannot hold the nodes of a deployment; the message names the bundles that are missing."""


class NoNodeAvailable(PdserveError):
    """No ready node can take the request now."""
