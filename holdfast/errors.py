"""What Holdfast raises; a message has the code, the values and the way out (docs/errors.md)."""

from holdfast import (
    ApiError,
    FailedRunError,
    HoldfastError,
    PlatformError,
    TemporaryError,
    UserError,
)

__all__ = [
    "ApiError",
    "FailedRunError",
    "HoldfastError",
    "PlatformError",
    "TemporaryError",
    "UserError",
]
