"""The conductor: where each request runs (DESIGN §3, steps 2 and 3).

Owns the cluster's view, folded from registry, load snapshots and decisions, and carries out what
`policy.place` decides on it. Knows no tokens, no blocks' contents and no request after its placement.
"""
