"""The `moonpool` command: starts a stack, serves a role, shows status, chats, measures.

Owns what a person types and sees, and the processes of a local stack. Knows nothing of how a request is
served: it starts the services and speaks to them over HTTP, the bus and the control plane.
"""
