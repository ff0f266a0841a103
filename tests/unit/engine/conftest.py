"""The oracle models, each made once per test session."""

import pytest
import torch
from tests.support.tiny_oracles import SPECS, Oracle, make_oracle


@pytest.fixture(scope="session", params=SPECS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.set_num_threads(1)
    return make_oracle(tmp_path_factory.mktemp("oracles") / request.param, request.param)
