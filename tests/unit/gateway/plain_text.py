"""What the text of an answer is, the plain way: from the whole of it."""


def cut_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Cut at the first end of a stop string; of those that end there the longest counts."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop
