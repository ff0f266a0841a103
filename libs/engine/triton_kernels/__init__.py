"""Kernels in Triton, one file a family: each has a launch function of torch tensors beside its kernel.

Importing a module here needs triton but no GPU; launching needs one, or Triton's interpreter
(TRITON_INTERPRET=1 in the environment before triton is first imported). The kernels know tensors and
strides: nothing of models, sequences' owners or graphs.

What holds in all of them: the last dimension of every tensor is contiguous and all other strides are
arguments; offsets into the cache are 64 bits wide; sums are float32; a slot that no token was written
to is never loaded, so stale NaN cannot reach a result. What may be many (tokens, blocks) is the first
dimension of a grid: the others end at 65,535.
"""
