"""The decode service: generates, and with `--coupled` prefills as well. Its duties live in `worker`."""
