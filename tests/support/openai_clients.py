"""OpenAI's own clients as tests use them: no key that means anything, no retry unless one is asked for."""

from typing import Any

import openai
from tests.support.stack import RunningStack

ANSWER_S_MAX = 90.0
"""Longest silence of the server, on a machine that does other things as well."""
NO_KEY = "none"
"""What a client sends where no keys are asked for: it does not go without."""


def client_of(stack: RunningStack, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.state.url, **_settings(settings))


def async_client_of(stack: RunningStack, **settings: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=stack.state.url, **_settings(settings))


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {"api_key": NO_KEY, "max_retries": 0, "timeout": ANSWER_S_MAX} | settings
