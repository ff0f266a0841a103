"""A tiny model, what transformers answers on it, and a prefill and a decode worker that serve it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.reference import Reference
from tests.support.workers import PAIR, Workers, workers

from engine.tiny import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Reference:
    return Reference(tiny)


@pytest.fixture
async def pair(tiny: Path) -> AsyncIterator[Workers]:
    async with workers(tiny, PAIR, step_tokens_max=32) as both:
        yield both
