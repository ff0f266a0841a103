"""A gateway with a cluster that does as it is told, and the model's folder; a module may have its own."""

import pytest
from tests.unit.gateway.fake_cluster import running_cluster
from tests.unit.gateway.model_files import write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def cluster(folder):
    async with running_cluster(folder) as running:
        yield running
