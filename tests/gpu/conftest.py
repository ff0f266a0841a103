"""Everything here needs a CUDA device; without one each test is skipped and says why."""

import pytest
import torch
from tests.support.tiny_oracles import SPECS, Oracle, make_oracle


@pytest.fixture(autouse=True)
def cuda_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.fixture(scope="session", params=SPECS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return make_oracle(tmp_path_factory.mktemp("oracles") / request.param, request.param)
