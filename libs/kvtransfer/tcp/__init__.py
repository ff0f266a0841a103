"""The TCP transport: works between any two processes, needs nothing but sockets.

One authenticated connection per direction of use (a peer that calls and a peer that is called),
many requests in flight on it by number, payload in chunks that alternate between the requests.
All of it runs on the event loop's thread with non-blocking sockets: the check of a grant and the
`recv` into its memory are one step that nothing can come between, so a revoke needs no lock.
"""
