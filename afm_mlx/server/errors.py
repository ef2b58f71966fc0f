"""Errors as clients of the APIs read them: a status, and a body in OpenAI's or Anthropic's form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from afm_mlx.errors import (
    MESSAGE,
    AFMError,
    ContextLengthError,
    LogitsError,
)
from afm_mlx.server.request_ids import HEADERS, REQUEST_ID

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "server_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a request is answered with when it can't be honoured.

    Args:
        status: HTTP status.
        message: what is wrong, what was got, what is allowed and what to do next.
        param: the field that is meant, such as `messages[0].content`.
        code: a word for programs, such as `model_not_found`.
        type: OpenAI's kind of error; that of the status by default.
        retry_after: seconds after which another try makes sense.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        cut = message if len(message) <= MESSAGE else message[: MESSAGE - 3] + "..."
        super().__init__(cut)
        self.status, self.message = status, cut
        self.param, self.code = param, code
        default = "server_error" if status >= 500 else "invalid_request_error"
        self.type = type or _TYPES.get(status, default)
        self.retry_after = retry_after
        self._headers = dict(headers or {})

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response besides its type and length."""
        found = dict(self._headers)
        if request_id := REQUEST_ID.get():
            found |= dict.fromkeys(HEADERS, request_id)
        if self.retry_after is not None:
            found["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        return found

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's form."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, default)
        # Anthropic's errors have no place for the field, which most messages begin with.
        field = self.param or ""
        message = self.message if field in self.message else f"{field}: {self.message}"
        return {
            "type": "error",
            "error": {"type": kind, "message": message},
            "request_id": REQUEST_ID.get() or None,
        }

    def body_for(self, path: str) -> dict[str, Any]:
        """The body in the form of the API that a path belongs to."""
        is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
        return self.anthropic() if is_anthropic else self.openai()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that can't be honoured."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception, param: str | None = None) -> ApiError:
    """What a client reads of an error that was raised while its request was answered.

    Args:
        error: an `ApiError` stays what it is; what a user can mend is a 400. Anything else is a 500 whose text
            stays in the log: it may tell of the server's files.
        param: the field that is meant, where the error is a 400.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=param, code="context_length_exceeded")
    if isinstance(error, LogitsError):
        # Of a request's own biases it is raised where those are known.
        return ApiError(500, str(error), code="no_token")
    if isinstance(error, AFMError):
        return ApiError(400, str(error), param=param)
    return ApiError(
        500,
        "The server has failed at this request; its log says why, under the id in the header x-request-id.",
        code="internal_error",
    )
