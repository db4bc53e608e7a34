"""Errors as OpenAI's API shows them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import Response

from pdserve.errors import ContextLengthError, NoNodeAvailable, OutOfPages, PdserveError, RequestError
from pdserve.openai.responses import ErrorBody, ErrorDetail

_log = logging.getLogger(__name__)
RETRY_AFTER_S = 1


@dataclass(slots=True, eq=False)
class ApiError(PdserveError):
    """An answer that is an error. `outcome` is how the metrics count it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def outcome(self) -> str:
        if self.status < 500:
            return "rejected"
        return "unavailable" if self.status == 503 else "error"

    def body(self) -> ErrorBody:
        return ErrorBody(error=ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code))

    def response(self) -> Response:
        return Response(self.body().model_dump_json(), self.status, dict(self.headers), media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def generation_failed(message: str) -> ApiError:
    return ApiError(500, message, type="server_error", code="generation_failed")


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """What a caller is told of any error. Our own errors are written for users; of others only the log says more."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return bad_request(str(error), error.param, "context_length_exceeded")
        case RequestError():
            return bad_request(str(error), error.param)
        case NoNodeAvailable() | OutOfPages():
            code = "no_node_available" if isinstance(error, NoNodeAvailable) else "out_of_pages"
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return ApiError(503, str(error), type="service_unavailable", code=code, headers=headers)
        case PdserveError():
            _log.error("request %s failed: %s", request_id, error)
            return generation_failed(str(error))
        case _:
            _log.error("request %s failed", request_id, exc_info=error)
            message = f"internal error; the server's log says more under request {request_id}"
            return ApiError(500, message, type="server_error", code="internal_error")
