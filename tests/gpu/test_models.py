"""Whole models on the GPU against transformers, and decode steps by graph against plain launches."""

import pytest
from tests.support.tiny_oracles import Oracle
from tests.support.triton_model_checks import check_graphs, check_model

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3
"""Of logits of several units: float32 products on tensor cores, in three parts, are not quite float32's."""


def test_model(oracle: Oracle) -> None:
    check_model(oracle.folder, oracle.prompt, oracle.logits, oracle.answer, "cuda", TOLERANCE)


def test_graphs(oracle: Oracle) -> None:
    check_graphs(oracle.folder, oracle.prompt, "cuda")
