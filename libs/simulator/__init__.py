"""The cluster without its machines: the same policy code under a simulated clock.

Owns request traces and what stands in for hardware, engines and network. Two simulations: what one pool of a
given size hits under each eviction order (`simulator.cache`), and a whole cluster as discrete events
(`simulator.cluster`). It knows no processes, no bytes and no wall clock.
"""
