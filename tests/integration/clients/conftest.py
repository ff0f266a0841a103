"""Clients that people use, against live stacks; nothing but loopback is reached meanwhile."""

from collections.abc import Iterator

import openai
import pytest
from tests.support.loopback import only_loopback
from tests.support.openai_clients import client_of
from tests.support.stack import RunningStack


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    with only_loopback():
        yield


@pytest.fixture(scope="module")
def client(smollm2_stack: RunningStack) -> Iterator[openai.OpenAI]:
    with client_of(smollm2_stack) as client:
        yield client
