"""Settings of a gateway."""

from dataclasses import dataclass, field

from cluster.context import ServiceConfig
from gateway.answers.liveness import SilenceLimits
from gateway.answers.requests import PLACEMENTS_ASKED_MAX, GatewayLimits
from gateway.answers.running import RequestLimits
from gateway.http_body import BODIES_BYTES_MAX_DEFAULT, BODY_BYTES_MAX_DEFAULT, BodyLimits
from protocol.answer import PLACEMENT_ATTEMPTS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    model_folder: str = field(metadata={"help": "folder with config.json, tokenizer.json and safetensors"})
    model_name: str = field(default="", metadata={"help": "name clients use; empty: the folder's name"})
    dtype: str = field(
        default="float32", metadata={"help": "dtype of weights and KV, as the workers have it"}
    )
    weight_dtype: str = field(
        default="", metadata={"help": "dtype of the weights alone, as the workers have it; empty: dtype"}
    )
    requests_max: int = field(
        default=1024, metadata={"help": "requests in progress; more are 429", "min": 1, "max": 1_000_000}
    )
    request_timeout_s: float = field(
        default=600.0, metadata={"help": "a request's whole life", "min": 0.1, "max": 86_400.0}
    )
    schedule_timeout_s: float = field(
        default=5.0, metadata={"help": "wait for a conductor's answer", "min": 0.1, "max": 60.0}
    )
    submit_timeout_s: float = field(
        default=5.0, metadata={"help": "wait for prefill to accept or refuse", "min": 0.1, "max": 60.0}
    )
    notice_timeout_s: float = field(
        default=2.0,
        metadata={"help": "wait for the acknowledgement of a finish or cancel", "min": 0.1, "max": 60.0},
    )
    placement_attempts_max: int = field(
        default=PLACEMENT_ATTEMPTS_MAX,
        metadata={"help": "placements of one request, refusals and losses alike", "min": 1, "max": 100},
    )
    placements_asked_max: int = field(
        default=PLACEMENTS_ASKED_MAX,
        metadata={"help": "placements asked of conductors at once; other requests wait", "min": 1},
    )
    replacements_in_flight_max: int = field(
        default=16,
        metadata={"help": "requests that ask for another placement at once", "min": 1, "max": 65_536},
    )
    unsent_chars_max: int = field(
        default=1_000_000,
        metadata={"help": "text that may wait for a slow client before it is cut off", "min": 1000},
    )
    write_timeout_s: float = field(
        default=60.0, metadata={"help": "a client that reads nothing is cut off", "min": 0.1, "max": 3600.0}
    )
    keep_alive_s: float = field(
        default=15.0,
        metadata={"help": "a stream silent for so long gets a comment", "min": 0.05, "max": 3600.0},
    )
    body_bytes_max: int = field(
        default=BODY_BYTES_MAX_DEFAULT,
        metadata={"help": "bytes of a request body; more is 413", "min": 1024},
    )
    bodies_bytes_max: int = field(
        default=BODIES_BYTES_MAX_DEFAULT,
        metadata={"help": "bytes of all bodies being read; more is 429", "min": 1024},
    )
    body_timeout_s: float = field(
        default=60.0, metadata={"help": "wait for the whole body", "min": 0.1, "max": 3600.0}
    )
    api_keys_file: str = field(
        default="",
        metadata={"help": "TOML file of tenants and hashes of their API keys; read again when it changes"},
    )
    api_keys: tuple[str, ...] = field(
        default=(), repr=False, metadata={"help": "tenant=sha256:... entries beside that file"}
    )
    cors_origins: tuple[str, ...] = field(
        default=(), metadata={"help": "origins whose pages may call the API, or *; empty: none"}
    )
    tls_cert_file: str = field(
        default="", metadata={"help": "PEM file of the certificate and its chain; with tls_key_file"}
    )
    tls_key_file: str = field(default="", metadata={"help": "PEM file of the certificate's key"})
    reuse_port: bool = field(
        default=False, metadata={"help": "other gateways may listen on http_port, too (SO_REUSEPORT)"}
    )
    connections_max: int = field(
        default=8192, metadata={"help": "open connections; more are 503", "min": 1, "max": 1_000_000}
    )
    header_timeout_s: float = field(
        default=30.0, metadata={"help": "wait for a request's headers", "min": 0.1, "max": 3600.0}
    )
    idle_timeout_s: float = field(
        default=75.0,
        metadata={"help": "a connection on which nothing is asked is closed", "min": 0.1, "max": 86_400.0},
    )
    tokenize_threads: int = field(
        default=2, metadata={"help": "threads that tokenise prompts", "min": 1, "max": 256}
    )
    silence_s_max: float = field(
        default=5.0,
        metadata={"help": "an instance without lease and this silent is lost", "min": 0.5, "max": 600.0},
    )
    dead_s_max: float = field(
        default=60.0,
        metadata={"help": "an instance this silent is lost, lease or not", "min": 1.0, "max": 3600.0},
    )

    def body_limits(self) -> BodyLimits:
        return BodyLimits(self.body_bytes_max, self.bodies_bytes_max, self.body_timeout_s)

    def silence_limits(self) -> SilenceLimits:
        return SilenceLimits(self.silence_s_max, self.dead_s_max)

    def gateway_limits(self) -> GatewayLimits:
        return GatewayLimits(
            requests_max=self.requests_max,
            notice_timeout_s=self.notice_timeout_s,
            placements_asked_max=self.placements_asked_max,
            replacements_in_flight_max=self.replacements_in_flight_max,
            request=RequestLimits(
                request_timeout_s=self.request_timeout_s,
                schedule_timeout_s=self.schedule_timeout_s,
                submit_timeout_s=self.submit_timeout_s,
                unsent_chars_max=self.unsent_chars_max,
                placement_attempts_max=self.placement_attempts_max,
            ),
        )
