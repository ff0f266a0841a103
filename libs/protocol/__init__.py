"""The life of a request as state machines without I/O (DESIGN §3).

Owns who may do what in which order: attempts, reservations, commit, token order, resume, cancel and the
directory's synchronisation. A machine is a pure function `(state, event, now_s) -> (state, effects)`:
shells feed it messages and carry out the effects; the fault simulator feeds it a hostile network. Knows
no bus, no clock, no engine.
"""
