"""How times stand in the detail of a refusal: so that two that differ are seen to."""


def told_s(time_s: float) -> str:
    """With its unit; milliseconds of long times, four digits of short ones."""
    return f"{time_s:.3f} s" if time_s >= 1.0 else f"{time_s:.4g} s"
