"""Every decision as a pure function over frozen data: place, predict, plan_step, evict; the cost model.

Owns what is decided, not when nor with which news: no clock, no I/O, no randomness of its own. The
conductor, the workers and the simulator run this same code.
"""
