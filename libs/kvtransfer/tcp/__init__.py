"""The TCP transport: works between any two processes, needs nothing but sockets.

A link is several authenticated connections for one direction of use (a peer that calls and a peer that is
called), bound together by one id; many requests are in flight on each by number, payload in chunks that
alternate between the requests. All of it runs on the event loop's thread with non-blocking sockets: the
check of a grant and the `recv` into its memory are one step that nothing can come between, so a revoke
needs no lock. Only copies to and from granted memory of devices run in threads (`staging`), and a revoke
waits for those.

Order: one connection keeps the bytes of an older write before those of a newer one. Across connections
the link does: a newer write waits for the end of those that were given up, and a newer link's owner ends
the connections of the older link before it says WELCOME.
"""
