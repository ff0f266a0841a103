"""Changes a model folder's JSON files for a test."""

import json
from pathlib import Path

NULL = object()
"""A field that is there and null."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def change(folder: Path, file: str = "config.json", **fields: object) -> None:
    """Sets fields of a JSON file; None removes one, NULL makes it null."""
    config = {**json.loads((folder / file).read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / file).write_text(json.dumps(kept, default=lambda value: None if value is NULL else value))
