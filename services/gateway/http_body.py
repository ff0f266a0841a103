"""Reading request bodies within bounds: of one body, of all bodies together, and of time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from gateway.api.api_errors import BODY_TIMEOUT, OVERLOADED, TOO_LARGE, ApiError, invalid
from gateway.body_encoding import EncodingError, Inflater

MEBIBYTE = 1024 * 1024
BODY_BYTES_MAX_DEFAULT = 64 * MEBIBYTE
BODIES_BYTES_MAX_DEFAULT = 512 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`body_bytes_max` of one body, `bodies_bytes_max` of all that are being read or decoded."""

    body_bytes_max: int = BODY_BYTES_MAX_DEFAULT
    bodies_bytes_max: int = BODIES_BYTES_MAX_DEFAULT
    body_timeout_s: float = 60.0


class BodyReader:
    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Of all bodies that are being read or decoded."""
        return self._held_bytes

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body, decompressed; it counts as held until the context is left. Raises ApiError."""
        chunks: list[bytes] = []
        held_before = 0
        try:
            if (request.content_length or 0) > self._limits.body_bytes_max:
                raise self._too_large()
            async with asyncio.timeout(self._limits.body_timeout_s):
                inflater = Inflater(request.headers.get("Content-Encoding", ""))
                async for received in request.content.iter_any():
                    for chunk in inflater.pieces(received):
                        chunks.append(chunk)
                        held_before += len(chunk)
                        self._held_bytes += len(chunk)
                        self._check(held_before)
                        if chunk is not received:
                            # A small part of a bomb is many pieces: others come in between.
                            await asyncio.sleep(0)
                inflater.finish()
            yield b"".join(chunks)
        except TimeoutError:
            message = f"the body did not come within {self._limits.body_timeout_s:g} s"
            raise ApiError(BODY_TIMEOUT, message) from None
        except EncodingError as error:
            raise invalid(None, str(error), "invalid_body") from error
        except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
            told = " ".join(str(error).split())
            raise invalid(None, f"the body cannot be read: {told}", "invalid_body") from error
        finally:
            self._held_bytes -= held_before

    def _check(self, body_bytes: int) -> None:
        if body_bytes > self._limits.body_bytes_max:
            raise self._too_large()
        if self._held_bytes > self._limits.bodies_bytes_max:
            message = f"request bodies of {self._limits.bodies_bytes_max} bytes are being read already"
            raise ApiError(OVERLOADED, message, reason="bodies_full")

    def _too_large(self) -> ApiError:
        return ApiError(TOO_LARGE, f"the body exceeds {self._limits.body_bytes_max} bytes")
