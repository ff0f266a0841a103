"""The gateway's own metrics: what clients asked, what they got, and how long they waited for it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.prediction_errors import PredictionErrors

TTFT = "ttft"
"""What the gateway compares with its prediction."""

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_REQUEST_BUCKETS_S = (0.001, 0.005, *_TTFT_BUCKETS_S, 300.0, 600.0)
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class GatewayMetrics:
    """Labels are routes, statuses and reasons from fixed sets, and tenants that API keys are configured for;
    no client's word ever becomes one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "moonpool_gateway_requests", "API requests answered", ["route", "status"], registry=registry
        )
        self.request_s = Histogram(
            "moonpool_gateway_request_seconds",
            "From a request's arrival to the last byte of its answer",
            ["route"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.loop_lag_s = Histogram(
            "moonpool_gateway_loop_lag_seconds",
            "How late the event loop comes to what is due, sampled",
            buckets=_LAG_BUCKETS_S,
            registry=registry,
        )
        self.rejected = Counter(
            "moonpool_gateway_rejected_requests",
            "Requests that the cluster or the gateway had no room for",
            ["reason"],
            registry=registry,
        )
        self.in_progress = Gauge(
            "moonpool_gateway_in_progress_requests", "Generations in progress", registry=registry
        )
        self.body_bytes = Gauge(
            "moonpool_gateway_body_bytes", "Of request bodies being read or decoded", registry=registry
        )
        self.client_gone = Counter(
            "moonpool_gateway_client_gone_requests",
            "Generations whose client left before the end",
            registry=registry,
        )
        self.placements = Counter(
            "moonpool_gateway_placements", "Placements asked, retries included", registry=registry
        )
        self.notices_given_up = Counter(
            "moonpool_gateway_given_up_notices",
            "Cancels and finishes that nobody acknowledged",
            registry=registry,
        )
        self.stray_entries = Counter(
            "moonpool_gateway_stray_entries",
            "Stream entries of requests that are not in progress here, or malformed",
            registry=registry,
        )
        self.ttft_s = Histogram(
            "moonpool_gateway_ttft_seconds",
            "From a request's arrival to the first token for each of its prompts",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.prediction_errors = PredictionErrors(registry, (TTFT,))
        self.token_gap_s = Histogram(
            "moonpool_gateway_token_gap_seconds",
            "Between two deliveries of tokens of one answer",
            buckets=_GAP_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "moonpool_gateway_prompt_tokens", "Prompt tokens of finished answers", registry=registry
        )
        self.cached_tokens = Counter(
            "moonpool_gateway_cached_tokens", "Those of them that were cached", registry=registry
        )
        self.completion_tokens = Counter(
            "moonpool_gateway_completion_tokens", "Tokens of finished answers", registry=registry
        )
        self.tenant_requests = Counter(
            "moonpool_gateway_tenant_requests",
            "Requests with a tenant's API key",
            ["tenant"],
            registry=registry,
        )
        self.tenant_rejected = Counter(
            "moonpool_gateway_tenant_rejected_requests",
            "Requests beyond a tenant's own limits",
            ["tenant", "reason"],
            registry=registry,
        )
        self.tenant_tokens = Counter(
            "moonpool_gateway_tenant_tokens",
            "Tokens of prompts and answers that count against a tenant's limit",
            ["tenant"],
            registry=registry,
        )
        self.limits_divided_by = Gauge(
            "moonpool_gateway_limits_divided_by",
            "Gateways that tenants' limits are divided among",
            registry=registry,
        )
