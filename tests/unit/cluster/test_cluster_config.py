import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cluster_config import (
    DOCUMENT_BYTES_MAX,
    SETTINGS,
    ClusterConfig,
    config_of,
    differences,
    encode_document,
    parse_document,
    with_settings,
    without_settings,
)
from cluster.errors import ConfigError, ProtocolError

pytestmark = pytest.mark.unit


def test_settings_from_text_become_values() -> None:
    document = with_settings(
        {"ttft_ms_default": 1.0},
        {
            "strategy": "cache_aware",
            "ttft_ms_default": "500",
            "replication_requests_min": "4",
            "adaptive": "true",
        },
    )
    assert document == {
        "strategy": "cache_aware",
        "ttft_ms_default": 500.0,
        "replication_requests_min": 4,
        "adaptive": True,
    }
    assert config_of(document) == ClusterConfig(
        strategy="cache_aware", ttft_ms_default=500.0, replication_requests_min=4, adaptive=True
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("strategy", "best", "strategy: 'best' is not one of random, load_balance, "),
        ("admission", "", "admission: '' is not one of none, snapshot, predictive"),
        (
            "kvcache_balancing_threshold",
            "0.5",
            "kvcache_balancing_threshold: 0.5 is not from 1.0 to 1000000.0",
        ),
        ("ttft_ms_default", "soon", "ttft_ms_default: 'soon' is not a number"),
        ("ttft_ms_default", "nan", "ttft_ms_default: nan is not from 0.0 to 3600000.0"),
        ("tbt_ms_default", "-1", "tbt_ms_default: -1.0 is not from 0.0 to 60000.0"),
        ("replication_requests_min", "1", "replication_requests_min: 1 is not from 2 to 1000000"),
        ("replication_requests_min", "2.5", "replication_requests_min: '2.5' is not an integer"),
        ("adaptive", "perhaps", "adaptive: 'perhaps' is not true or false"),
        ("ttft_ms", "1", "ttft_ms: no such setting: did you mean ttft_ms_default?"),
        ("colour", "1", "colour: no such setting: there are adaptive, "),
    ],
)
def test_a_bad_setting_is_refused_by_name_and_limit(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        with_settings({}, {name: text})
    assert str(refusal.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", "x" * 60_000),
        ("strategy", list(range(9_000))),
        ("adaptive", "y" * 60_000),
        ("replication_requests_min", 10**4_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_long_is_refused_in_one_line_that_can_be_read(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        config_of({name: value})
    assert str(refusal.value).startswith(f"{name}: {repr(value)[:64]}… (")
    assert len(str(refusal.value)) < 200
    with pytest.raises(ConfigError) as refusal:
        with_settings({}, {"z" * 60_000: "1"})
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_an_integer_beyond_all_floats_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match=r"^replication_requests_min: .* is not from 2 to 1000000$"):
        config_of({"replication_requests_min": value})
    with pytest.raises(ConfigError, match=r"^ttft_ms_default: -?inf is not from 0.0 to 3600000.0$"):
        config_of({"ttft_ms_default": value})


def test_a_change_is_refused_where_something_else_that_is_set_is_bad() -> None:
    broken = {"strategy": 7, "admission": "none"}
    with pytest.raises(ConfigError, match="strategy: 7 is not text"):
        with_settings(broken, {"ttft_ms_default": "5"})
    with pytest.raises(ConfigError, match="strategy: 7 is not text"):
        without_settings(broken, ["admission"])
    assert without_settings(broken, ["strategy"]) == {"admission": "none"}


def test_unsetting_takes_what_is_set_and_refuses_what_nobody_knows() -> None:
    document = {"ttft_ms_default": 1.0, "of_a_newer_version": [1]}
    assert without_settings(document, ["ttft_ms_default", "strategy"]) == {"of_a_newer_version": [1]}
    assert without_settings(document, ["of_a_newer_version"]) == {"ttft_ms_default": 1.0}
    with pytest.raises(ConfigError, match="ttft_ms_defaul: no such setting: did you mean ttft_ms_default"):
        without_settings(document, ["ttft_ms_defaul"])


def test_settings_of_a_newer_version_are_kept_and_mean_nothing() -> None:
    document = {"of_a_newer_version": {"a": 1}, "strategy": None}
    assert config_of(document) == ClusterConfig()
    assert with_settings(document, {"admission": "none"})["of_a_newer_version"] == {"a": 1}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[1]", "list, must be a JSON object"),
        (b"{" + b" " * DOCUMENT_BYTES_MAX + b"}", "at most 65536"),
    ],
)
def test_what_is_no_document_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        parse_document(data)


def test_differences_name_what_changed() -> None:
    before = ClusterConfig(strategy="random", ttft_ms_default=5.0)
    after = ClusterConfig(ttft_ms_default=5.0, tbt_ms_default=1.0)
    assert differences(before, after) == {"strategy": None, "tbt_ms_default": 1.0}
    assert differences(after, after) == {}


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(SETTINGS)), st.text(max_size=8)),
        st.one_of(
            st.none(), st.booleans(), st.integers(-9, 9), st.floats(), st.text(max_size=8), st.just([])
        ),
        max_size=4,
    )
)
def test_any_document_is_taken_or_refused_as_a_whole(document: dict[str, object]) -> None:
    """Whatever another wrote there, it is a configuration within its limits or a ConfigError."""
    try:
        config = config_of(document)
    except ConfigError:
        return
    for name, setting in SETTINGS.items():
        value = differences(ClusterConfig(), config).get(name)
        assert value is None or setting.check(value, name) == value


def test_a_document_survives_its_encoding() -> None:
    document = with_settings({"of_a_newer_version": [1]}, {"tbt_ms_default": "20", "strategy": "joint"})
    assert parse_document(encode_document(document)) == document
