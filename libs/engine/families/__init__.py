"""The model families: how each computes, written on `engine.ops` alone.

`decoder` is the model they share; `llama`, `qwen2`, `qwen3` and `mistral` say what is theirs. What a
config.json may say, and which tensors follow from it, is in `engine.model_families` and
`engine.tensor_shapes`, which need no torch.
"""
