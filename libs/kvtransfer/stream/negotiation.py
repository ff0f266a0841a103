"""The handshake carried out on a socket, for either side. The caller of both bounds the time."""

import asyncio
import secrets
import socket
from dataclasses import dataclass

from kvtransfer.errors import AuthError, FrameError, PeerLostError
from kvtransfer.stream import handshake
from kvtransfer.stream.handshake import NONCE_BYTES, PREFIX_BYTES, Hello, Refusal, Role, Step


@dataclass(frozen=True, slots=True)
class Admitted:
    """A caller that proved itself, and the WELCOME that it waits for, once its session is in place."""

    peer: str
    link_id: bytes
    welcome: bytes


async def prove_as_caller(sock: socket.socket, name: str, peer: str, secret: bytes, link_id: bytes) -> None:
    """Returns once each side knows that the other holds the secret.

    Raises AuthError, FrameError, BusyError, PeerLostError, OSError; the socket stays the caller's.
    """
    hello = Hello(secrets.token_bytes(NONCE_BYTES), link_id, name, peer)
    await _send(sock, handshake.pack_hello(hello))
    owner_nonce = await _receive(sock, Step.CHALLENGE)
    await _send(sock, handshake.pack(Step.PROOF, handshake.proof(secret, Role.CALLER, hello, owner_nonce)))
    welcome = await _receive(sock, Step.WELCOME)
    handshake.check_proof(secret, Role.OWNER, hello, owner_nonce, welcome)


async def check_caller(sock: socket.socket, name: str, secret: bytes) -> Admitted:
    """The other half of `prove_as_caller`, up to the WELCOME, which is not sent yet.

    Raises AuthError, FrameError, PeerLostError, OSError; what the caller should know was sent to it.
    """
    try:
        hello = handshake.parse_hello(await _receive(sock, Step.HELLO))
    except FrameError:
        await _send(sock, handshake.pack_refused(Refusal.VERSION))
        raise
    if hello.owner != name:
        await _send(sock, handshake.pack_refused(Refusal.NAME))
        raise PeerLostError(f"{hello.caller!r} looks for {hello.owner!r} here")
    owner_nonce = secrets.token_bytes(NONCE_BYTES)
    await _send(sock, handshake.pack(Step.CHALLENGE, owner_nonce))
    try:
        sent = await _receive(sock, Step.PROOF)
        handshake.check_proof(secret, Role.CALLER, hello, owner_nonce, sent)
    except AuthError:
        await _send(sock, handshake.pack_refused(Refusal.SECRET))
        raise
    welcome = handshake.pack(Step.WELCOME, handshake.proof(secret, Role.OWNER, hello, owner_nonce))
    return Admitted(hello.caller, hello.link_id, welcome)


async def _send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def _receive(sock: socket.socket, expected: Step) -> bytes:
    step, body_bytes = handshake.parse_prefix(await _receive_exactly(sock, PREFIX_BYTES))
    body = await _receive_exactly(sock, body_bytes)
    handshake.check_body(step, expected, body)
    return body


async def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Never a byte more: what follows the handshake belongs to the connection."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise PeerLostError("the peer closed the connection in the handshake")
        data += part
    return data
