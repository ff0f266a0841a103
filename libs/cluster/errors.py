"""One tree of errors, by who must act.

`RejectedError` the client must change or wait; `RetryableError` the gateway places the request again;
`LostError` a peer died or went silent; `ProtocolError` what came in is malformed: count it, drop it,
live on. Nothing else crosses a room's border on purpose.
"""


class MoonpoolError(Exception):
    """Base of every error that Moonpool raises on purpose."""


class ConfigError(MoonpoolError):
    """A setting is unknown, malformed or out of range; the message names the setting and the limit."""


class RejectedError(MoonpoolError):
    """The client must act: change the request, or come again after `retry_after_s`."""

    def __init__(self, reason: str, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.retry_after_s = retry_after_s


class RetryableError(MoonpoolError):
    """This placement failed; another may succeed."""


class DeadlineError(RetryableError):
    """No answer within the time that was left."""


class NoResponderError(RetryableError):
    """Nobody listens on the subject."""


class DisconnectedError(RetryableError):
    """Our own connection to the bus or the control plane is down."""


class LeaseLostError(RetryableError):
    """The lease that a key should hang on is gone; grant a new one."""


class LostError(MoonpoolError):
    """The peer died, or was silent for too long to be waited for."""


class ProtocolError(MoonpoolError):
    """A message or frame is malformed; counted and dropped, never fatal."""
