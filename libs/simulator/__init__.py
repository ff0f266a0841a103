"""The cluster without its machines: the same policy code under a simulated clock.

Owns request traces and what stands in for hardware. So far it holds the cache alone: what one pool of a given
size hits under each eviction order. It knows no processes, no bytes and no wall clock.
"""
