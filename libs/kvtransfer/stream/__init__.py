"""Authenticated streams of frames over a socket: what the transports share.

Owns the handshake, the framing, and moving bytes between a socket and registered memory on the event
loop. Knows nothing of which transport a stream belongs to or what its frames ask for.
"""
