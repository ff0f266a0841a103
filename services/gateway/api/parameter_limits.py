"""The bounds of the API's parameters that the types of requests hold: each number in one place.

Those that the engine has too are `policy.sampling_limits`'. What depends on the served model is
`gateway.api.validate`'s.
"""

TEMPERATURE_MAX = 2.0
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 1024
HINT_CHARS_MAX = 512
METADATA_ENTRIES_MAX = 16
CACHE_SALT_CHARS_MAX = 256
CHOICES_MAX = 128
"""Answers to one prompt, `n`."""
PROMPTS_MAX = 1024
"""Prompts of one request, and prompts times `n`."""
MESSAGES_MAX = 16_384
MESSAGE_PARTS_MAX = 4096
MESSAGE_CALLS_MAX = 128
TOKEN_ID_DIGITS_MAX = 10
TTFT_MS_MIN, TTFT_MS_MAX = 1.0, 3_600_000.0
TBT_MS_MIN, TBT_MS_MAX = 0.1, 60_000.0
STRUCTURE_CHOICES_MAX = 4096
TOOLS_MAX = 128
TOOL_NAME_PATTERN = "^[a-zA-Z0-9_-]{1,64}$"
TOOL_DESCRIPTION_CHARS_MAX = 64 * 1024
TEMPLATE_VARIABLES_MAX = 32
