"""The shared memory transport: between two processes of one host, whoever owns the destination copies.

Memory that is a `SharedBuffer` is mapped read-only by the other side, enforced by the kernel; other
memory is read out of the other process (`process_vm_readv`). So nobody ever writes into memory of
another process, and a late write cannot exist: the owner of a granted range stops its own copies when
it revokes.

What a late *read* may see is settled by boards (`board.py`): a word per permission, in shared memory,
that the reader looks at before and after every chunk. A permission that is gone after a chunk was
copied makes the reader wipe that chunk and fail the call, however long it stood still in between.
The map itself is not cut to the granted ranges: a peer knows the cluster secret and can read a region
that it was given any grant of.
"""
