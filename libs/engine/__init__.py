"""The engine: model weights, the paged KV cache, the forward pass and the sampler.

Owns everything between token ids with a block table and the next token. It does not know requests,
messages, who owns a block or where its bytes travel. `model_folder`, `layout`, `step`, `tiny`,
`gguf_import` and `models` import no torch; `families`, `loader`, `ops`, `paged_cache`, `sampler` and
`engine` do.
"""
