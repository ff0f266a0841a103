"""Each family on the Triton kernels, interpreted, against transformers."""

import pytest
from tests.support.interpreted import Interpreter
from tests.support.tiny_oracles import Oracle
from tests.support.triton_model_checks import check_graphs, check_model

pytestmark = pytest.mark.unit


# What else the models differ in (rope scaling, tied weights) never reaches a kernel.
@pytest.mark.parametrize(
    "oracle", ["llama-9-heads-3-kv", "qwen2", "qwen3-tied-slides", "mistral-sliding"], indirect=True
)
def test_model(interpreter: Interpreter, oracle: Oracle) -> None:
    interpreter.call(check_model, oracle.folder, oracle.prompt, oracle.logits, oracle.answer, "cpu", 1e-4)


@pytest.mark.parametrize("oracle", ["llama-9-heads-3-kv"], indirect=True)
def test_steps_padded_as_for_a_graph(interpreter: Interpreter, oracle: Oracle) -> None:
    interpreter.call(check_graphs, oracle.folder, oracle.prompt, "cpu")
