"""Transfers over RDMA: the caller's network devices move the bytes, the owner's processor sees the end.

Control frames (requests, keys, answers) go over an authenticated stream as with tcp; payload goes over
reliable-connected queue pairs, one per pair of network devices, which together are the lanes of a link.
What touches libibverbs needs the Python package pyverbs and is imported once rdma is asked for; without it,
or without a device, an endpoint gets TransportUnavailable. `ports`, `work`, `sendqueue`, `lane_cut` and
`frames` are pure.
"""
