"""Block identity: the hash chain that gives every KV block its content address.

Owns how tokens become block hashes, how a namespace keeps apart what must not be shared, and the
model fingerprint. Knows tokens and namespaces, nothing else: not who holds a block, nor where.
"""
