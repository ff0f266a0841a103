"""One worker whose memory holds a few prompts and whose SSD holds all: in a whole stack, over restarts."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.support.loose_stack import LooseStack, loose_stack

from engine.tiny import make_tiny_model
from moonpool.api import Api, ApiError, Json

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BLOCK_TOKENS = 16
PROMPT_TOKENS = 401
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
ANSWER_TOKENS = 8
PROMPTS = 16
POOL_BYTES = 16 << 20
"""Some 170 blocks: six prompts."""
SSD_BYTES = 64 << 20
WORKER = "coupled-0"
RETRIES_MAX = 40
RETRY_S = 0.25
SERVICES = ("kvmeta-0", "conductor-0", "gateway-0")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So much larger than `tiny` that to read a block is quicker than to compute it, as with real ones."""
    folder = tmp_path_factory.mktemp("models") / "small"
    make_tiny_model(folder, hidden_size=256, intermediate_size=512, layers=6)
    return folder


@pytest.fixture
def stack(tmp_path: Path, model_folder: Path) -> Iterator[LooseStack]:
    with loose_stack(tmp_path, model_folder) as made:
        for name in SERVICES:
            made.launch(name)
        start_worker(made)
        for name in SERVICES:
            made.wait_ready(name)
        yield made


def start_worker(stack: LooseStack) -> None:
    sizes = ("--pool-bytes", str(POOL_BYTES), "--ssd-bytes", str(SSD_BYTES))
    stack.start(WORKER, flags=(*sizes, "--ssd-folder", str(stack.ssd_folder)))


def prompt(number: int) -> list[int]:
    numbers = random.Random(f"prompt {number}")
    return [numbers.randrange(10, 500) for _ in range(PROMPT_TOKENS)]


def ask(stack: LooseStack, number: int) -> tuple[str, int]:
    """(text, cached tokens) of one answer."""
    api = Api(stack.url("gateway-0"))
    body = {"model": api.model(), "prompt": prompt(number), "max_tokens": ANSWER_TOKENS, "temperature": 0}
    answer = patiently(lambda: api.post("/completions", body))
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def patiently(post: Callable[[], Json]) -> Json:
    """As a client does that is told to come again: the conductor counts what has just ended for a while."""
    pause = threading.Event()
    for _ in range(RETRIES_MAX):
        try:
            return post()
        except ApiError as error:
            if error.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise
        pause.wait(RETRY_S)
    return post()


def pool(stack: LooseStack) -> dict[str, object]:
    """What the worker tells of its pool, which it has checked."""
    with urlopen(f"{stack.url(WORKER)}/pool?check=1") as answer:
        told = json.load(answer)
    assert told["check"] == "ok"
    return told


def ssd(stack: LooseStack) -> dict[str, int]:
    (tier,) = pool(stack)["tiers"]
    assert tier["tier"] == "ssd"
    return tier


def test_a_prompt_that_had_to_make_room_is_cached_still(stack: LooseStack) -> None:
    first = [ask(stack, number) for number in range(PROMPTS)]
    assert pool(stack)["blocks"] < PROMPTS * PROMPT_BLOCKS / 2
    again = [ask(stack, number) for number in range(PROMPTS)]
    assert [text for text, _ in again] == [text for text, _ in first]
    assert [cached for _, cached in first] == [0] * PROMPTS
    assert [cached for _, cached in again] == [PROMPT_BLOCKS * BLOCK_TOKENS] * PROMPTS
    told = pool(stack)
    assert ssd(stack)["risen_total"] > 0
    assert told["dropped_total"] == told["gone_total"] == told["in_use"] == 0
    files = [path for path in (stack.ssd_folder / WORKER).rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_blocks * 512 for path in files) <= SSD_BYTES


@pytest.mark.parametrize("end", [LooseStack.stop, LooseStack.kill], ids=["stopped", "killed"])
def test_a_restart_finds_the_blocks_of_the_ssd(
    stack: LooseStack, end: Callable[[LooseStack, str], object]
) -> None:
    first = [ask(stack, number) for number in range(PROMPTS)]
    sunk = ssd(stack)["copies"]
    end(stack, WORKER)
    start_worker(stack)
    found = ssd(stack)["copies"]
    if end is LooseStack.stop:  # what only memory held was written at the end
        assert found >= PROMPTS * PROMPT_BLOCKS
    else:
        assert found >= sunk >= PROMPT_BLOCKS
    text, cached_tokens = ask(stack, 0)
    assert text == first[0][0]
    assert cached_tokens == PROMPT_BLOCKS * BLOCK_TOKENS
