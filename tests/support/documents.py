"""The project's documents as text, without what their code blocks show."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "benchmarks/README.md",
    "docs/eviction.md",
    "docs/gateway.md",
    "docs/performance.md",
    "docs/pool.md",
    "docs/schedulers.md",
    "docs/simulator.md",
    "docs/transfer.md",
)
_CODE_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"`([^`\n]+)`")


def prose(document: str) -> str:
    return _CODE_FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))


def code_spans(text: str) -> list[str]:
    return _CODE_SPAN.findall(text)
