"""llguidance's explanations, made fit for an error message."""

DETAIL_CHARS_MAX = 300


def shortened(explanation: str) -> str:
    """In one line, without its drawings of the parser's state."""
    text = " ".join(explanation.split("\n<", 1)[0].split())
    return text if len(text) <= DETAIL_CHARS_MAX else text[: DETAIL_CHARS_MAX - 1] + "…"
