"""Sends a trace of requests to a running cluster, and tells what came of it.

`schedule`, `prompts`, `records` and `statistics` are functions on data; `sender` is the one file that talks
to the cluster; `report` and `page` write down what `statistics` found. Nothing here knows the cluster's
inside: only the OpenAI-compatible API.
"""
