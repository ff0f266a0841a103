"""Bodies within bounds, compressed ones too, on a real socket."""

import asyncio
import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_cluster import chat_body, ids, running_cluster

from gateway.body_encoding import PIECE_BYTES_MAX, EncodingError, Inflater
from gateway.http_body import BodyLimits

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
BODY_BYTES_MAX = 1 << 20


@pytest.fixture
async def cluster(folder):
    limits = BodyLimits(body_bytes_max=BODY_BYTES_MAX, bodies_bytes_max=2 * BODY_BYTES_MAX, body_timeout_s=5)
    async with running_cluster(folder, body_limits=limits) as running:
        yield running


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


async def post(cluster, data: bytes, encoding: str) -> tuple[int, dict[str, object]]:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with cluster.session.post(cluster.url + CHAT, data=data, headers=headers) as reply:
        return reply.status, json.loads(await reply.read())


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity", bytes),
    ],
)
async def test_a_compressed_body_is_read(cluster, encoding, pack) -> None:
    body = pack(json.dumps(chat_body()).encode())
    asking = asyncio.create_task(post(cluster, body, encoding))
    submit = await asyncio.wait_for(cluster.prefill.submits.get(), 5)
    await cluster.decode.say(submit, ids("Paris."))
    status, _ = await asking
    assert status == 200


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
async def test_a_bomb_is_refused_where_it_exceeds_the_bound(cluster, pack) -> None:
    encoding = "gzip" if pack is gzip.compress else "deflate"
    bomb = pack(b" " * (40 * BODY_BYTES_MAX))
    assert len(bomb) < BODY_BYTES_MAX / 10
    status, answer = await post(cluster, bomb, encoding)
    assert status == 413
    assert answer["error"]["code"] == "request_too_large"
    assert cluster.requests.in_progress == 0


@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("gzip", b"no gzip", "not gzip data"),
        ("deflate", b"\xff\xff\xff", "not deflate data"),
        ("gzip", gzip.compress(b"x" * 1000)[:-9], "ends in the middle"),
        ("deflate", zlib.compress(b"{}") + b"more", "goes on after"),
        ("br", b"x", "Content-Encoding is 'br', must be gzip or deflate"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), "must be gzip or deflate"),
    ],
)
async def test_what_is_not_what_it_says_is_named(cluster, encoding, body, message) -> None:
    status, answer = await post(cluster, body, encoding)
    assert status == 400
    assert answer["error"]["code"] == "invalid_body"
    assert message in answer["error"]["message"]


@given(st.binary(max_size=5000), st.sampled_from(["gzip", "deflate", "raw"]), st.integers(1, 700))
def test_pieces_joined_are_the_body_however_it_comes(data: bytes, encoding: str, chunk: int) -> None:
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "raw": raw_deflate}[encoding](data)
    encoding = "deflate" if encoding == "raw" else encoding
    inflater = Inflater(encoding)
    found = [
        piece for at in range(0, len(packed), chunk) for piece in inflater.pieces(packed[at : at + chunk])
    ]
    inflater.finish()
    assert b"".join(found) == data


@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate", "", "br"]))
def test_whatever_comes_is_read_or_refused(data: bytes, encoding: str) -> None:
    try:
        inflater = Inflater(encoding)
        for piece in inflater.pieces(data):
            assert len(piece) <= PIECE_BYTES_MAX
        inflater.finish()
    except EncodingError:
        return


def test_no_piece_is_larger_than_its_bound() -> None:
    inflater = Inflater("gzip")
    sizes = [len(piece) for piece in inflater.pieces(gzip.compress(b"x" * (10 * PIECE_BYTES_MAX + 5)))]
    assert sum(sizes) == 10 * PIECE_BYTES_MAX + 5
    assert max(sizes) <= PIECE_BYTES_MAX
