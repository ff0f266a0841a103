"""Models for tests: SmolLM2, converted once into the user's cache and shared by every run, and tiny ones."""

import os
from functools import cache
from pathlib import Path

from engine.models import resolve_model


def models_home() -> Path:
    """Where `moonpool` keeps its models: $MOONPOOL_HOME, else ~/.cache/moonpool."""
    return Path(os.environ.get("MOONPOOL_HOME") or Path.home() / ".cache" / "moonpool")


@cache
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; converted on first use, about 10 s."""
    return resolve_model("smollm2", models_home(), lambda _: None)


@cache
def tiny_folder() -> Path:
    """The `tiny` model of the command line."""
    return resolve_model("tiny", models_home(), lambda _: None)
