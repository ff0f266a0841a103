"""The page that a command writes at its end with `--html`."""

from pathlib import Path

from moonpool.errors import CommandError


def claim_html(path: Path | None) -> None:
    """Before the page's work: one that cannot be written is better known then. CommandError, or
    OSError with the file's name."""
    if path is None:
        return
    try:
        path.touch()
    except FileNotFoundError:
        raise CommandError(f"--html: {path} cannot be written: there is no folder {path.parent}") from None
