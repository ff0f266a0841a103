"""Ranges of parameters: what is outside is refused with the parameter's name and its limits. Pure."""

from collections.abc import Sequence

from gateway.api.api_errors import invalid


def check_range(what: str, value: float, low: float, high: float, *, param: str | None = None) -> None:
    if not low <= value <= high:
        raise invalid(param or what, f"{what} is {shown(value)}, must be {low} to {high}")


def shown(value: float) -> str:
    """For messages; Python refuses to print integers of thousands of digits."""
    return str(value) if -(2**64) < value < 2**64 else "beyond 64 bits"


def check_token_ids(param: str, token_ids: Sequence[int], vocabulary_tokens: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary_tokens):
        return
    index, token_id = next(
        (index, token_id) for index, token_id in enumerate(token_ids) if not 0 <= token_id < vocabulary_tokens
    )
    what = f"{param}[{index}]"
    raise invalid(what, f"{what} is {shown(token_id)}, must be 0 to {vocabulary_tokens - 1}")
