"""The CPU's fast path: C++ kernels compiled on first use, behind the same operations as `engine.torch_ops`.

`build` compiles and caches the sources of `src`, `library` calls them, `native_ops` offers them as
`engine.ops.Ops`. Without a compiler nothing here is needed: the torch operations compute the same.
"""
