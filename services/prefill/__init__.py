"""The prefill service: computes prompts and hands their KV over. Its duty lives in `worker`."""
