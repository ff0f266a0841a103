"""kvmeta: which instance holds which prefix (DESIGN §3 step 3, §5).

Owns nothing that cannot be rebuilt: an index of what instances announce, kept true by
`protocol.inventory` and served from `kvindex.directory`. Knows no request and no block's contents.
"""
