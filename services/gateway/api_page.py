"""The API told to its users: `/openapi.json` for tools, and a page for people that reads it.

Both are made once. The page works without the internet, and its scripts may speak to this server only.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from aiohttp import web

from gateway.api.openapi import document_bytes
from gateway.calls import Call, json_response

PAGE_FILE = Path(__file__).with_name("api_page.html")
PAGE_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    }
)


class ApiPages:
    def __init__(self, model: str) -> None:
        """`model`: the name of the served one."""
        self._document = document_bytes(model)
        self._page = PAGE_FILE.read_text(encoding="utf-8")

    async def document(self, _http: web.Request, _call: Call) -> web.StreamResponse:
        return json_response(200, self._document)

    async def page(self, _http: web.Request, _call: Call) -> web.StreamResponse:
        return web.Response(text=self._page, content_type="text/html", headers=PAGE_HEADERS)
