"""A worker whose blocks nobody could read is refused, with the reason, and disturbs nobody."""

from pathlib import Path

import pytest
from tests.support.loose_stack import loose_stack
from tests.support.models import tiny_folder
from tests.support.scrape import metrics

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

EXIT_USAGE = 2


def test_another_dtype_of_the_same_model_is_refused_at_registration(tmp_path: Path) -> None:
    with loose_stack(tmp_path, tiny_folder()) as stack:
        stack.start("kvmeta-0", "prefill-0")
        stack.launch("decode-0", "--dtype", "bfloat16")
        assert stack.wait_end("decode-0") == EXIT_USAGE
        last = stack.log_tail("decode-0").splitlines()[-1]
        assert last.startswith(
            "decode: model 'tiny': dtype is bfloat16, but prefill-0, which is registered, "
        )
        assert metrics(stack.url("kvmeta-0")).value("moonpool_registry_instances", role="decode") == 0
        # Under a name of its own it is another model.
        stack.start("decode-1", flags=("--dtype", "bfloat16", "--model-name", "tiny-bfloat16"))
        assert stack.stop("decode-1") == 0
        assert metrics(stack.url("prefill-0")).value("moonpool_registered") == 1
