"""Which model is asked, where, and how much fits into its context."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.api import Api, Json
from moonpool.errors import CommandError, UsageError


@dataclass(frozen=True, slots=True)
class Target:
    completions_url: str
    model: str
    context_tokens_max: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = None
    """Where `completions_url` is https; None: the machine's certificates."""


def find_target(api: Api, model: str | None, context_tokens: int | None) -> Target:
    """`model`, or the first that is served; `context_tokens`, or what the server says of the model.

    Raises CommandError where the server cannot be asked or has no such model, UsageError where the context
    has to be given.
    """
    models = api.get("/models").get("data")
    if not isinstance(models, list) or not all(
        isinstance(served, dict) and isinstance(served.get("id"), str) for served in models
    ):
        raise CommandError(f"{api.url}/models is no list of models; is this an OpenAI-compatible server?")
    if not models:
        raise CommandError(f"{api.url} serves no model yet")
    chosen = _chosen(models, model, api.url)
    context_tokens = context_tokens or chosen.get("max_model_len")
    if not isinstance(context_tokens, int):
        raise UsageError(
            f"{api.url} does not say how long {chosen['id']}'s context is: give --context-tokens"
        )
    url = api.address("/completions")
    return Target(
        url, chosen["id"], context_tokens, api.headers(), api.tls() if url.startswith("https:") else None
    )


def _chosen(models: list[Json], name: str | None, url: str) -> Json:
    chosen = models[0] if name is None else next((each for each in models if each["id"] == name), None)
    if chosen is None:
        served = ", ".join(each["id"] for each in models)
        raise CommandError(f"--model: {url} does not serve {name!r}, but {served}")
    return chosen
