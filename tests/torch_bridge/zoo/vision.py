"""Vision and vision-language networks of transformers."""

from functools import partial
from typing import Any

import torch

from tests.torch_bridge.zoo.specimen import hugging_face, images, integers, normal, tokens

_add = partial(hugging_face, group="vision")
VIT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
PATCHES = {**VIT, "image_size": 32, "patch_size": 8}
TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 49,
    "pad_token_id": 1,
}
TOWERS = {"text_config": TEXT, "vision_config": PATCHES, "projection_dim": 8}
CONVS: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1]}


def classified(rows: int) -> dict[str, Any]:
    return images(rows, classes=2)


def captioned(rows: int) -> dict[str, Any]:
    batch = tokens(rows)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        **images(rows, classes=None),
    }


def segmented(rows: int) -> dict[str, Any]:
    return {**images(rows, classes=None), "labels": integers(2, rows, 32, 32)}


def videos(rows: int) -> dict[str, Any]:
    return {"pixel_values": normal(rows, 4, 3, 16, 16), "labels": torch.arange(rows) % 2}


def contrastive(rows: int) -> dict[str, Any]:
    return {**captioned(rows), "return_loss": True}


_add("vit", "ViTForImageClassification", classified, listed=True, **PATCHES)
_add(
    "swin",
    "SwinForImageClassification",
    classified,
    listed=True,
    image_size=32,
    patch_size=4,
    embed_dim=8,
    depths=[2, 1],
    num_heads=[2, 2],
    window_size=4,
)
_add(
    "convnext", "ConvNextForImageClassification", classified, listed=True, layer_scale_init_value=0.5, **CONVS
)
_add(
    "resnet",
    "ResNetForImageClassification",
    classified,
    listed=True,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="basic",
)
_add("clip", "CLIPModel", contrastive, listed=True, **TOWERS)
_add(
    "resnet bottleneck",
    "ResNetForImageClassification",
    classified,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    layer_type="bottleneck",
)
_add("vit pooled", "ViTModel", lambda rows: images(rows, classes=None), **PATCHES)
_add("deit", "DeiTForImageClassification", classified, **PATCHES)
_add("beit", "BeitForImageClassification", classified, use_relative_position_bias=True, **PATCHES)
_add(
    "data2vec vision",
    "Data2VecVisionForImageClassification",
    classified,
    use_relative_position_bias=True,
    **PATCHES,
)
_add(
    "dinov2",
    "Dinov2ForImageClassification",
    classified,
    **{k: v for k, v in PATCHES.items() if k != "intermediate_size"},
)
_add("dinov3", "DINOv3ViTModel", lambda rows: images(rows, classes=None), random=True, **PATCHES)
_add("ijepa", "IJepaModel", lambda rows: images(rows, classes=None), **PATCHES)
_add(
    "vit mae",
    "ViTMAEForPreTraining",
    lambda rows: {**images(rows, classes=None), "noise": normal(rows, 16)},
    decoder_num_attention_heads=2,
    decoder_hidden_size=16,
    decoder_num_hidden_layers=1,
    decoder_intermediate_size=32,
    **PATCHES,
)
_add(
    "swinv2",
    "Swinv2ForImageClassification",
    classified,
    image_size=32,
    patch_size=4,
    embed_dim=8,
    depths=[2, 1],
    num_heads=[2, 2],
    window_size=4,
)
_add("convnextv2", "ConvNextV2ForImageClassification", classified, **CONVS)
_add(
    "segformer",
    "SegformerForSemanticSegmentation",
    segmented,
    depths=[1, 1],
    hidden_sizes=[8, 16],
    num_encoder_blocks=2,
    num_attention_heads=[1, 2],
    sr_ratios=[4, 2],
    patch_sizes=[7, 3],
    strides=[4, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=16,
)
_add(
    "mobilenet_v1",
    "MobileNetV1ForImageClassification",
    lambda rows: images(rows, 64, classes=2),
    image_size=64,
    depth_multiplier=0.25,
    min_depth=4,
)
_add(
    "mobilenet_v2",
    "MobileNetV2ForImageClassification",
    lambda rows: images(rows, 64, classes=2),
    image_size=64,
    depth_multiplier=0.25,
    min_depth=4,
    depth_divisible_by=4,
)
_add(
    "mobilevit",
    "MobileViTForImageClassification",
    classified,
    image_size=32,
    hidden_sizes=[8, 8, 8],
    neck_hidden_sizes=[4, 4, 4, 4, 4, 4, 8],
    num_attention_heads=2,
)
_add(
    "efficientnet",
    "EfficientNetForImageClassification",
    classified,
    image_size=32,
    width_coefficient=0.25,
    depth_coefficient=0.3,
    hidden_dim=320,
    num_hidden_layers=4,
)
_add(
    "regnet",
    "RegNetForImageClassification",
    classified,
    embedding_size=8,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    groups_width=4,
)
_add(
    "levit",
    "LevitForImageClassification",
    classified,
    image_size=32,
    hidden_sizes=[16, 16, 24],
    num_attention_heads=[1, 2, 2],
    depths=[1, 1, 1],
    key_dim=[8, 8, 8],
    patch_size=16,
)
_add("poolformer", "PoolFormerForImageClassification", classified, **CONVS)
_add(
    "bit",
    "BitForImageClassification",
    classified,
    embedding_size=32,
    hidden_sizes=[32, 32],
    depths=[1, 1],
    num_groups=8,
)
_add(
    "cvt",
    "CvtForImageClassification",
    classified,
    embed_dim=[8, 8, 16],
    num_heads=[1, 1, 2],
    depth=[1, 1, 1],
    drop_path_rate=[0.0, 0.0, 0.0],
)
_add(
    "pvt",
    "PvtForImageClassification",
    classified,
    image_size=32,
    hidden_sizes=[8, 16, 16, 16],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 2],
    mlp_ratios=[2, 2, 2, 2],
    sequence_reduction_ratios=[4, 2, 1, 1],
)
_add(
    "focalnet",
    "FocalNetForImageClassification",
    classified,
    image_size=32,
    embed_dim=8,
    depths=[1, 1],
    hidden_sizes=[8, 16],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
)
_add(
    "hiera",
    "HieraForImageClassification",
    classified,
    image_size=[32, 32],
    embed_dim=8,
    depths=[1, 1],
    num_heads=[1, 2],
    mask_unit_size=[2, 2],
    query_stride=[2, 2],
    num_query_pool=1,
)
_add(
    "swiftformer",
    "SwiftFormerForImageClassification",
    classified,
    image_size=32,
    depths=[1, 1, 1, 1],
    embed_dims=[8, 8, 16, 16],
)
_add("videomae", "VideoMAEForVideoClassification", videos, image_size=16, patch_size=8, num_frames=4, **VIT)
_add(
    "timesformer",
    "TimesformerForVideoClassification",
    videos,
    image_size=16,
    patch_size=8,
    num_frames=4,
    **VIT,
)
_add(
    "vivit", "VivitForVideoClassification", videos, image_size=16, num_frames=4, tubelet_size=[2, 8, 8], **VIT
)
_add(
    "siglip",
    "SiglipModel",
    lambda rows: {"input_ids": tokens(rows)["input_ids"], **images(rows, classes=None), "return_loss": True},
    text_config=TEXT,
    vision_config=PATCHES,
)
_add(
    "clipseg",
    "CLIPSegForImageSegmentation",
    captioned,
    extract_layers=[0, 1],
    reduce_dim=8,
    decoder_num_attention_heads=2,
    decoder_intermediate_size=16,
    **TOWERS,
)
_add(
    "blip",
    "BlipForConditionalGeneration",
    lambda rows: {**captioned(rows), "labels": tokens(rows)["labels"]},
    text_config={**TEXT, "encoder_hidden_size": 16, "sep_token_id": 2},
    vision_config=PATCHES,
)
_add(
    "blip retrieval",
    "BlipModel",
    contrastive,
    text_config={**TEXT, "encoder_hidden_size": 16, "sep_token_id": 2},
    vision_config=PATCHES,
    projection_dim=8,
)
_add("chinese clip", "ChineseCLIPModel", contrastive, **TOWERS)
_add(
    "altclip",
    "AltCLIPModel",
    contrastive,
    text_config={**TEXT, "project_dim": 8},
    vision_config=PATCHES,
    projection_dim=8,
)
_add(
    "clip vision",
    "CLIPVisionModelWithProjection",
    lambda rows: images(rows, classes=None),
    projection_dim=8,
    **PATCHES,
)
_add(
    "vilt",
    "ViltModel",
    captioned,
    vocab_size=50,
    image_size=32,
    patch_size=8,
    max_position_embeddings=16,
    **VIT,
)
_add("flava", "FlavaImageModel", lambda rows: images(rows, classes=None), **PATCHES)
_add(
    "sam",
    "SamModel",
    lambda rows: {**images(rows, classes=None), "input_points": normal(rows, 1, 2, 2).abs() * 8},
    vision_config={
        **VIT,
        "mlp_dim": 32,
        "image_size": 32,
        "patch_size": 8,
        "output_channels": 8,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 4,
    },
    prompt_encoder_config={"hidden_size": 8, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
    mask_decoder_config={
        "hidden_size": 8,
        "mlp_dim": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "iou_head_hidden_dim": 8,
        "attention_downsample_rate": 1,
    },
)
_add(
    "detr",
    "DetrModel",
    lambda rows: images(rows, classes=None),
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone=None,
    backbone_config={
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    num_queries=4,
)
_add(
    "yolos",
    "YolosModel",
    lambda rows: images(rows, classes=None),
    image_size=[32, 32],
    num_detection_tokens=4,
    **{**VIT, "patch_size": 8},
)
_add(
    "dpt",
    "DPTForSemanticSegmentation",
    segmented,
    image_size=32,
    patch_size=8,
    backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[8, 8, 8, 8],
    fusion_hidden_size=8,
    reassemble_factors=[4, 2, 1, 0.5],
    auxiliary_loss_weight=0.0,
    is_hybrid=False,
    **{**VIT, "num_hidden_layers": 4},
)
_add(
    "glpn",
    "GLPNForDepthEstimation",
    lambda rows: images(rows, 64, classes=None),
    num_encoder_blocks=4,
    depths=[1, 1, 1, 1],
    hidden_sizes=[8, 8, 16, 16],
    num_attention_heads=[1, 1, 2, 2],
    sr_ratios=[4, 2, 1, 1],
    mlp_ratios=[2, 2, 2, 2],
    decoder_hidden_size=8,
)
_add(
    "upernet",
    "UperNetForSemanticSegmentation",
    segmented,
    backbone_config={
        "model_type": "convnext",
        **CONVS,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    },
    hidden_size=16,
    auxiliary_channels=8,
    auxiliary_in_channels=16,
    pool_scales=[1, 2],
)
_add(
    "swin2sr",
    "Swin2SRForImageSuperResolution",
    lambda rows: images(rows, 16, classes=None),
    image_size=16,
    patch_size=1,
    embed_dim=8,
    depths=[1],
    num_heads=[2],
    window_size=4,
    upscale=2,
)
_add(
    "perceiver",
    "PerceiverForMaskedLM",
    lambda rows: tokens(rows, length=16),
    vocab_size=50,
    d_model=16,
    d_latents=16,
    num_latents=4,
    num_self_attends_per_block=1,
    num_self_attention_heads=2,
    num_cross_attention_heads=2,
    max_position_embeddings=16,
)
