"""What keeps blocks apart: every two tenants, adapters, models, dtypes and block sizes have other hashes."""

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvhash import block_hashes, model_fingerprint, namespace, unpack

pytestmark = pytest.mark.unit

TOKEN_IDS = list(range(64))
MODELS = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """All that a block's bytes depend on beside its tokens."""

    cluster_seed: bytes
    model: int
    dtype: str
    kv_dtype: str
    block_tokens: int
    tenant_salt: str
    adapter: str


identities = st.builds(
    Identity,
    st.sampled_from([b"a", b"b", b""]),
    st.integers(0, MODELS - 1),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.sampled_from([8, 16, 32]),
    # Also what could pass for the end of one field and the start of the next.
    st.sampled_from(["", "a", "b", "ab", "\x01a"]),
    st.sampled_from(["", "a", "b", "ab", "\x01a"]),
)


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Identity], str]:
    folder = tmp_path_factory.mktemp("models")

    def model_folder(number: int) -> Path:
        """One shape and configuration, other weights."""
        path = folder / str(number)
        path.mkdir()
        (path / "config.json").write_text('{"model_type": "llama"}')
        save_file({"weights": np.full(64, number, np.float32)}, path / "model.safetensors")
        return path

    folders = [model_folder(number) for number in range(MODELS)]

    @cache
    def computed(model: int, dtype: str, kv_dtype: str, block_tokens: int) -> str:
        return model_fingerprint(folders[model], dtype, kv_dtype, block_tokens)

    return lambda one: computed(one.model, one.dtype, one.kv_dtype, one.block_tokens)


@given(identities, identities, st.sets(st.sampled_from([field.name for field in fields(Identity)])))
def test_hashes_are_shared_by_equal_identities_only(
    fingerprint: Callable[[Identity], str], one: Identity, another: Identity, changed: set[str]
) -> None:
    other = replace(one, **{name: value for name, value in asdict(another).items() if name in changed})
    chains = [
        unpack(block_hashes(namespace(i.cluster_seed, fingerprint(i), i.tenant_salt, i.adapter), TOKEN_IDS))
        for i in (one, other)
    ]
    if one == other:
        assert chains[0] == chains[1]
    else:
        assert set(chains[0]).isdisjoint(chains[1]), (astuple(one), astuple(other))
