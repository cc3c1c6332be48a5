"""Decoders of transformers: attention of every kind, mixtures of experts, state spaces."""

from functools import partial
from typing import Any

from tests.torch_bridge.zoo.specimen import hugging_face, tokens

_add = partial(hugging_face, group="decoders")
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT = {
    "vocab_size": 50,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def unpadded(rows: int) -> dict[str, Any]:
    batch = tokens(rows)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def experts(implementation: str) -> Any:
    def adjust(config: Any) -> None:
        config._experts_implementation = implementation

    return adjust


_add("gpt2", "GPT2LMHeadModel", tokens, listed=True, **GPT)
_add("gpt_neox", "GPTNeoXForCausalLM", tokens, listed=True, **SMALL)
_add("llama", "LlamaForCausalLM", tokens, listed=True, **GROUPED)
_add("mistral", "MistralForCausalLM", tokens, listed=True, sliding_window=4, **GROUPED)
_add(
    "mixtral grouped",
    "MixtralForCausalLM",
    tokens,
    listed=True,
    num_local_experts=4,
    num_experts_per_tok=2,
    adjust=experts("grouped_mm"),
    **GROUPED,
)
_add(
    "mixtral batched",
    "MixtralForCausalLM",
    tokens,
    listed=True,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    adjust=experts("batched_mm"),
    **GROUPED,
)
_add(
    "mixtral eager",
    "MixtralForCausalLM",
    tokens,
    num_local_experts=4,
    num_experts_per_tok=2,
    adjust=experts("eager"),
    **GROUPED,
)
_add("qwen2", "Qwen2ForCausalLM", tokens, listed=True, **GROUPED)
_add("qwen3", "Qwen3ForCausalLM", tokens, listed=True, head_dim=8, **GROUPED)
_add("gemma2", "Gemma2ForCausalLM", tokens, listed=True, head_dim=8, sliding_window=4, **GROUPED)
_add("phi3", "Phi3ForCausalLM", tokens, listed=True, **GROUPED)
_add(
    "opt",
    "OPTForCausalLM",
    tokens,
    listed=True,
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=32,
    max_position_embeddings=40,
    word_embed_proj_dim=16,
)
_add(
    "gpt_neo",
    "GPTNeoForCausalLM",
    tokens,
    vocab_size=50,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
    max_position_embeddings=40,
    bos_token_id=0,
    eos_token_id=1,
)
_add("gptj", "GPTJForCausalLM", tokens, rotary_dim=4, **GPT)
_add("codegen", "CodeGenForCausalLM", tokens, rotary_dim=4, **{**GPT, "n_head": 4})
_add("openai-gpt", "OpenAIGPTLMHeadModel", tokens, **{k: v for k, v in GPT.items() if "token" not in k})
_add("ctrl", "CTRLLMHeadModel", tokens, dff=32, **{k: v for k, v in GPT.items() if "token" not in k})
_add("bigcode", "GPTBigCodeForCausalLM", tokens, **GPT)
_add("bloom", "BloomForCausalLM", tokens, vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
_add(
    "falcon",
    "FalconForCausalLM",
    tokens,
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    alibi=False,
)
_add(
    "falcon alibi",
    "FalconForCausalLM",
    tokens,
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    alibi=True,
    new_decoder_architecture=False,
)
_add("mpt", "MptForCausalLM", tokens, vocab_size=50, d_model=16, n_layers=2, n_heads=2, max_seq_len=40)
_add("stablelm", "StableLmForCausalLM", tokens, **GROUPED)
_add("olmo", "OlmoForCausalLM", tokens, **GROUPED)
_add("olmo2", "Olmo2ForCausalLM", tokens, **GROUPED)
_add("olmoe", "OlmoeForCausalLM", tokens, num_experts=4, num_experts_per_tok=2, **GROUPED)
_add("cohere", "CohereForCausalLM", tokens, **GROUPED)
_add("cohere2", "Cohere2ForCausalLM", tokens, sliding_window=4, **GROUPED)
_add("gemma", "GemmaForCausalLM", tokens, head_dim=8, **GROUPED)
_add("gemma3", "Gemma3ForCausalLM", tokens, head_dim=8, sliding_window=4, **GROUPED)
_add("starcoder2", "Starcoder2ForCausalLM", tokens, sliding_window=4, **GROUPED)
_add("granite", "GraniteForCausalLM", tokens, **GROUPED)
_add("granitemoe", "GraniteMoeForCausalLM", tokens, num_local_experts=4, num_experts_per_tok=2, **GROUPED)
_add("phi", "PhiForCausalLM", tokens, **SMALL)
_add(
    "phimoe", "PhimoeForCausalLM", tokens, random=True, num_local_experts=4, num_experts_per_tok=2, **GROUPED
)
_add("persimmon", "PersimmonForCausalLM", tokens, **SMALL)
_add("nemotron", "NemotronForCausalLM", tokens, head_dim=4, **GROUPED)
_add("glm", "GlmForCausalLM", tokens, head_dim=4, **GROUPED)
_add("glm4", "Glm4ForCausalLM", tokens, head_dim=4, **GROUPED)
_add("helium", "HeliumForCausalLM", tokens, head_dim=4, **GROUPED)
_add("smollm3", "SmolLM3ForCausalLM", tokens, **GROUPED)
_add("ernie4_5", "Ernie4_5ForCausalLM", tokens, head_dim=4, **GROUPED)
_add("exaone4", "Exaone4ForCausalLM", tokens, sliding_window=4, **GROUPED)
_add("qwen2_moe", "Qwen2MoeForCausalLM", tokens, shared_expert_intermediate_size=16, **MOE, **GROUPED)
_add("qwen3_moe", "Qwen3MoeForCausalLM", tokens, head_dim=8, **MOE, **GROUPED)
_add(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    tokens,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    first_k_dense_replace=1,
    **SMALL,
)
_add(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    tokens,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=2,
    topk_group=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    first_k_dense_replace=1,
    **SMALL,
)
_add(
    "gpt_oss",
    "GptOssForCausalLM",
    tokens,
    head_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=4,
    **GROUPED,
)
_add(
    "mamba",
    "MambaForCausalLM",
    tokens,
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    time_step_rank=4,
)
_add(
    "mamba2",
    "Mamba2ForCausalLM",
    unpadded,
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    num_heads=4,
    head_dim=8,
    n_groups=1,
    chunk_size=4,
)
_add(
    "falcon_mamba",
    "FalconMambaForCausalLM",
    tokens,
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    time_step_rank=4,
)
_add(
    "rwkv",
    "RwkvForCausalLM",
    tokens,
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    attention_hidden_size=16,
    intermediate_size=32,
    context_length=16,
)
_add(
    "recurrent_gemma",
    "RecurrentGemmaForCausalLM",
    unpadded,
    num_hidden_layers=3,
    lru_width=16,
    attention_window_size=4,
    **{k: v for k, v in SMALL.items() if k not in ("max_position_embeddings", "num_hidden_layers")},
)
_add(
    "jetmoe",
    "JetMoeForCausalLM",
    tokens,
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_key_value_heads=2,
    kv_channels=8,
    intermediate_size=32,
    num_local_experts=4,
    num_experts_per_tok=2,
)
_add("biogpt", "BioGptForCausalLM", tokens, **SMALL)
_add(
    "xglm",
    "XGLMForCausalLM",
    tokens,
    vocab_size=50,
    d_model=16,
    num_layers=2,
    attention_heads=2,
    ffn_dim=32,
    max_position_embeddings=40,
)
