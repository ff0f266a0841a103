"""The gateway: OpenAI's HTTP API in front of the cluster (DESIGN §3, steps 1, 2, 4, 9 to 13).

Owns a client's connection, a request's text and its way through `protocol.answer`. Knows no model weights,
no blocks and no other service than by its messages. Sub-rooms: `text` (tokens to characters, calls in words),
`api` (types, checks, the document), `tenants` (who asks), `answers` (what becomes of a request); beside them
are the HTTP side and what puts them together.
"""
