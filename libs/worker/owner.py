"""What the step loop tells the duty behind a sequence."""

from typing import Protocol

from policy.core import FinishReason


class Owner(Protocol):
    """The duty behind a sequence; called in the event loop, at most once a step each."""

    def layer_done(self, layer: int, computed_tokens: int, last_layer: bool) -> None:
        """KV of `layer` is in the arena for all tokens before `computed_tokens`."""

    def chunk_done(self, computed_tokens: int) -> None:
        """The prompt's KV is computed before `computed_tokens`, and more is to come."""

    def token_sampled(self, token_id: int, ending: FinishReason | None) -> None:
        """One more token; with `ending` the sequence has left the loop."""

    def tokens_forced(self, token_ids: tuple[int, ...], ending: FinishReason | None) -> None:
        """More tokens that nobody sampled; with `ending` the sequence has left the loop."""

    def failed(self, detail: str) -> None:
        """The engine could not go on; the sequence has left the loop."""

    def refused(self, detail: str) -> None:
        """No engine could go on, for what the request asks; the sequence has left the loop."""
