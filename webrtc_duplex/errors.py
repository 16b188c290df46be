"""Every failure that has a name.

    DuplexError
     |- RequestError        the client's message is wrong                       4xx
     |- AuthError           who asks is unknown, or may not                     401, 403
     |- CallNotFoundError   unknown or ended call                               404, 410
     |- StaleEpochError     this lease no longer owns its row                   409
     |- CapacityError       every row is leased; carries Retry-After            503
     |- EngineError         the engine cannot serve: starting, draining, dead   503
     |- CheckpointError     weights, voice or tokenizer do not fit the model    500 (400 for a caller's voice)

Each carries its HTTP status and its code, so that nobody keeps a table of them. What happens daily in media - loss,
a late packet, an underrun, a missed tick - is no exception: it is concealed and counted.
"""


class DuplexError(Exception):
    """A failure with a sentence for the caller.

    `message` says what was wanted and what was there; `code` is for programs; `param` names the field at fault.
    """

    status = 500
    code = "internal_error"
    kind = "server_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class RequestError(DuplexError):
    """The client's message is wrong; it was not acted on."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class AuthError(DuplexError):
    """Who asks is unknown (401), or known and not allowed (403)."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class CallNotFoundError(DuplexError):
    """No such call, or no longer (404); its process has died (410, `call_lost`)."""

    status = 404
    code = "call_not_found"
    kind = "invalid_request_error"


class StaleEpochError(DuplexError):
    """The lease is of an earlier epoch: its row belongs to somebody else, or to nobody."""

    status = 409
    code = "stale_lease"
    kind = "invalid_request_error"


class CapacityError(DuplexError):
    """Every row is leased; try again after `retry_after_s`."""

    status = 503
    code = "at_capacity"
    kind = "capacity_error"


class EngineError(DuplexError):
    """The engine cannot serve: it is starting, draining or dead."""

    status = 503
    code = "not_ready"
    kind = "server_error"


class CheckpointError(DuplexError):
    """Weights, voice or tokenizer do not fit the model."""

    status = 500
    code = "bad_checkpoint"
    kind = "server_error"
