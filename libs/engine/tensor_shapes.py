"""The names and shapes of a checkpoint's tensors, as Hugging Face spells them. No torch here."""

from engine.model_folder import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this config holds, in file order; no head where it is tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.layers):
        prefix = layer_prefix(layer)
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (query, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (key_value, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (key_value, hidden)
        if config.qkv_bias:
            shapes[prefix + "self_attn.q_proj.bias"] = (query,)
            shapes[prefix + "self_attn.k_proj.bias"] = (key_value,)
            shapes[prefix + "self_attn.v_proj.bias"] = (key_value,)
        if config.head_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes
