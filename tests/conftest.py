"""Settings of the whole test run: they must stand before anything imports torch."""

import os

from hypothesis import settings

# How long one example takes says nothing on a machine that other processes share.
settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")

# One thread for each engine, in this process and in those it starts; two cores are shared by all of them.
os.environ["OMP_NUM_THREADS"] = "1"
# Where a test asks for more threads, those that wait sleep: on a busy machine they would spin for minutes.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# No test may reach for a model over the network.
os.environ["HF_HUB_OFFLINE"] = "1"

pytest_plugins = ("tests.support.servers",)
"""A real NATS and a real etcd, for whoever asks for the fixtures."""
