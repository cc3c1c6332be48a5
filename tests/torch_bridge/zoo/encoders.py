"""Encoders of transformers."""

from functools import partial
from typing import Any

import torch

from tests.torch_bridge.zoo.specimen import hugging_face, images, integers, normal, tokens

_add = partial(hugging_face, group="encoders")
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}


def classes(rows: int) -> dict[str, Any]:
    return {**tokens(rows), "labels": torch.arange(rows) % 2}


def answers(rows: int) -> dict[str, Any]:
    """Questions: the first and last token of the answer."""
    batch = tokens(rows)
    del batch["labels"]
    return {**batch, "start_positions": torch.arange(rows) % 5, "end_positions": torch.arange(rows) % 5 + 2}


def segments(rows: int) -> dict[str, Any]:
    batch = tokens(rows)
    return {**batch, "token_type_ids": (torch.arange(8) > 3).long().expand(rows, 8).contiguous()}


_add("bert", "BertForMaskedLM", segments, listed=True, **SMALL)
_add(
    "bert pre-training",
    "BertForPreTraining",
    lambda rows: {**tokens(rows), "next_sentence_label": torch.arange(rows) % 2},
    **SMALL,
)
_add("bert classes", "BertForSequenceClassification", classes, **SMALL)
_add("bert answers", "BertForQuestionAnswering", answers, **SMALL)
_add("roberta", "RobertaForMaskedLM", tokens, listed=True, **SMALL)
_add("albert", "AlbertForMaskedLM", tokens, listed=True, embedding_size=8, **SMALL)
_add("electra", "ElectraForMaskedLM", tokens, listed=True, embedding_size=8, **SMALL)
_add(
    "electra discriminator",
    "ElectraForPreTraining",
    lambda rows: {**tokens(rows), "labels": integers(2, rows, 8)},
    embedding_size=8,
    **SMALL,
)
_add(
    "distilbert",
    "DistilBertForMaskedLM",
    tokens,
    listed=True,
    vocab_size=50,
    dim=16,
    n_layers=2,
    n_heads=2,
    hidden_dim=32,
    max_position_embeddings=40,
)
_add(
    "xlm-roberta",
    "XLMRobertaForTokenClassification",
    lambda rows: {**tokens(rows), "labels": integers(2, rows, 8)},
    **SMALL,
)
_add("camembert", "CamembertForMaskedLM", tokens, **SMALL)
_add("mpnet", "MPNetForMaskedLM", tokens, **SMALL)
_add("deberta", "DebertaForMaskedLM", tokens, relative_attention=True, pos_att_type="c2p|p2c", **SMALL)
_add(
    "deberta-v2",
    "DebertaV2ForMaskedLM",
    tokens,
    relative_attention=True,
    position_buckets=4,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type="c2p|p2c",
    **SMALL,
)
_add("mobilebert", "MobileBertForMaskedLM", tokens, embedding_size=16, intra_bottleneck_size=16, **SMALL)
_add("squeezebert", "SqueezeBertForMaskedLM", tokens, embedding_size=16, **SMALL)
_add("convbert", "ConvBertForMaskedLM", tokens, embedding_size=16, **SMALL)
_add("megatron-bert", "MegatronBertForMaskedLM", tokens, **SMALL)
_add(
    "nystromformer",
    "NystromformerForMaskedLM",
    lambda rows: {"input_ids": tokens(rows)["input_ids"], "labels": tokens(rows)["labels"]},
    num_landmarks=4,
    segment_means_seq_len=8,
    **SMALL,
)
_add("ernie", "ErnieForMaskedLM", tokens, **SMALL)
_add("ibert", "IBertForMaskedLM", tokens, **SMALL)
_add("rembert", "RemBertForMaskedLM", tokens, input_embedding_size=8, output_embedding_size=8, **SMALL)
_add("roformer", "RoFormerForMaskedLM", tokens, embedding_size=16, **SMALL)
_add("splinter", "SplinterModel", lambda rows: {"input_ids": tokens(rows)["input_ids"]}, **SMALL)
_add(
    "fnet",
    "FNetForMaskedLM",
    lambda rows: {k: v for k, v in tokens(rows).items() if k != "attention_mask"},
    **SMALL,
)
_add(
    "xlm",
    "XLMWithLMHeadModel",
    tokens,
    vocab_size=50,
    emb_dim=16,
    n_layers=2,
    n_heads=2,
    max_position_embeddings=40,
)
_add(
    "flaubert",
    "FlaubertWithLMHeadModel",
    tokens,
    vocab_size=50,
    emb_dim=16,
    n_layers=2,
    n_heads=2,
    max_position_embeddings=40,
)
_add(
    "modernbert",
    "ModernBertForMaskedLM",
    tokens,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    cls_token_id=1,
    sep_token_id=2,
    local_attention=4,
    global_attn_every_n_layers=2,
    **SMALL,
)
_add(
    "funnel",
    "FunnelForMaskedLM",
    tokens,
    vocab_size=50,
    block_sizes=[1, 1],
    num_decoder_layers=1,
    d_model=16,
    n_head=2,
    d_head=8,
    d_inner=32,
)
_add("xlnet", "XLNetLMHeadModel", tokens, vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=32)
_add("longformer", "LongformerForMaskedLM", tokens, attention_window=4, pad_token_id=1, **SMALL)
_add("bigbird", "BigBirdForMaskedLM", tokens, attention_type="original_full", **SMALL)
_add(
    "bigbird sparse",
    "BigBirdForMaskedLM",
    lambda rows: tokens(rows, length=48),
    attention_type="block_sparse",
    block_size=4,
    num_random_blocks=1,
    **{**SMALL, "max_position_embeddings": 64},
)
_add(
    "canine",
    "CanineModel",
    lambda rows: {"input_ids": integers(50, rows, 16, least=1)},
    local_transformer_stride=4,
    downsampling_rate=4,
    **{k: v for k, v in SMALL.items() if k != "vocab_size"},
)
_add(
    "layoutlm",
    "LayoutLMForMaskedLM",
    lambda rows: {**tokens(rows), "bbox": integers(30, rows, 8, 1).expand(rows, 8, 4).contiguous()},
    max_2d_position_embeddings=40,
    **SMALL,
)
_add(
    "visual-bert",
    "VisualBertModel",
    lambda rows: {
        "input_ids": tokens(rows)["input_ids"],
        "attention_mask": tokens(rows)["attention_mask"],
        "visual_embeds": normal(rows, 3, 12),
        "visual_attention_mask": torch.ones(rows, 3),
    },
    visual_embedding_dim=12,
    **SMALL,
)
_add(
    "lxmert",
    "LxmertModel",
    lambda rows: {
        "input_ids": tokens(rows)["input_ids"],
        "visual_feats": normal(rows, 3, 12),
        "visual_pos": normal(rows, 3, 4),
    },
    visual_feat_dim=12,
    l_layers=1,
    x_layers=1,
    r_layers=1,
    **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"},
)
_add(
    "esm",
    "EsmForMaskedLM",
    tokens,
    position_embedding_type="rotary",
    pad_token_id=1,
    mask_token_id=2,
    **SMALL,
)
_add("dpr", "DPRContextEncoder", lambda rows: {"input_ids": tokens(rows)["input_ids"]}, **SMALL)
_add("luke", "LukeForMaskedLM", tokens, entity_vocab_size=10, entity_emb_size=8, **SMALL)
_add(
    "tapas",
    "TapasModel",
    lambda rows: {"input_ids": tokens(rows)["input_ids"], "token_type_ids": integers(2, rows, 8, 7)},
    type_vocab_sizes=[3, 8, 8, 2, 8, 8, 4],
    **SMALL,
)
_add(
    "layoutlmv3",
    "LayoutLMv3Model",
    lambda rows: {
        "input_ids": tokens(rows)["input_ids"],
        "bbox": integers(30, rows, 8, 1).expand(rows, 8, 4).contiguous(),
        **images(rows, 16, classes=None),
    },
    input_size=16,
    patch_size=8,
    coordinate_size=3,
    shape_size=2,
    max_2d_position_embeddings=40,
    rel_pos_bins=4,
    rel_2d_pos_bins=4,
    **SMALL,
)
