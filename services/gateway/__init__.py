"""The gateway: OpenAI's HTTP API in front of the cluster (DESIGN §3, steps 1, 2, 4, 9 to 13).

Owns a client's connection, a request's text and its way through `protocol.answer`. Knows no model weights,
no blocks and no other service than by its messages.
"""
