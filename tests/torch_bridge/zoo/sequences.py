"""Encoder-decoders, speech and time series of transformers."""

from functools import partial
from typing import Any

import torch

from tests.torch_bridge.zoo.specimen import hugging_face, integers, normal, tokens

_add = partial(hugging_face, group="sequences")
# Speech encoders ask their input for a gradient themselves, which torch forbids for what is computed.
_add_speech = partial(_add, input_gradients=False)
BART: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": 50,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
}
SPEECH: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "final_dropout": 0.0,
}


def pairs(rows: int) -> dict[str, Any]:
    """A source with padding and a target of another length."""
    batch = tokens(rows)
    labels = integers(50, rows, 6, least=3)
    labels[0, 4:] = -100
    return {**batch, "labels": labels}


def equal_pairs(rows: int) -> dict[str, Any]:
    """A source and a target that is given as it is."""
    batch = pairs(rows)
    return {**batch, "decoder_input_ids": integers(50, rows, 6, least=3)}


def waves(rows: int) -> dict[str, Any]:
    return {"input_values": normal(rows, 400)}


def transcripts(rows: int) -> dict[str, Any]:
    return {"input_values": normal(rows, 400), "labels": integers(20, rows, 5, least=1)}


def spectra(rows: int) -> dict[str, Any]:
    return {"input_features": normal(rows, 8, 40), "labels": integers(50, rows, 6, least=3)}


def series(rows: int) -> dict[str, Any]:
    return {"past_values": normal(rows, 16, 2), "future_values": normal(rows, 4, 2, seed=1)}


def observed(rows: int) -> dict[str, Any]:
    """A history with its covariates, as the time series transformers want it."""
    return {
        "past_values": normal(rows, 19), "past_time_features": normal(rows, 19, 2),
        "past_observed_mask": torch.ones(rows, 19), "future_values": normal(rows, 4),
        "future_time_features": normal(rows, 4, 2),
    }  # fmt: skip


_add("t5", "T5ForConditionalGeneration", pairs, listed=True, **T5)
_add("bart", "BartForConditionalGeneration", pairs, listed=True, **BART)
_add_speech(
    "wav2vec2",
    "Wav2Vec2ForSequenceClassification",
    lambda rows: {**waves(rows), "labels": torch.arange(rows) % 2},
    listed=True,
    classifier_proj_size=8,
    **SPEECH,
)
_add_speech("wav2vec2 ctc", "Wav2Vec2ForCTC", transcripts, **SPEECH)
_add("mt5", "MT5ForConditionalGeneration", pairs, **T5)
_add("umt5", "UMT5ForConditionalGeneration", pairs, **T5)
_add("longt5", "LongT5ForConditionalGeneration", pairs, local_radius=3, **T5)
_add(
    "switch",
    "SwitchTransformersForConditionalGeneration",
    pairs,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    **T5,
)
_add("mbart", "MBartForConditionalGeneration", pairs, **BART)
_add("pegasus", "PegasusForConditionalGeneration", pairs, **BART)
_add("marian", "MarianMTModel", pairs, **{**BART, "decoder_start_token_id": 1})
_add("m2m100", "M2M100ForConditionalGeneration", pairs, **BART)
_add("blenderbot", "BlenderbotForConditionalGeneration", pairs, **BART)
_add("plbart", "PLBartForConditionalGeneration", pairs, **BART)
_add(
    "led",
    "LEDForConditionalGeneration",
    pairs,
    attention_window=4,
    **{
        **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
        "max_encoder_position_embeddings": 40,
        "max_decoder_position_embeddings": 40,
    },
)
_add(
    "prophetnet",
    "ProphetNetForConditionalGeneration",
    pairs,
    vocab_size=50,
    hidden_size=16,
    num_encoder_layers=1,
    num_decoder_layers=1,
    num_encoder_attention_heads=2,
    num_decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    max_position_embeddings=40,
    decoder_start_token_id=0,
)
_add(
    "fsmt",
    "FSMTForConditionalGeneration",
    equal_pairs,
    langs=["en", "de"],
    src_vocab_size=50,
    tgt_vocab_size=50,
    **{k: v for k, v in BART.items() if k != "vocab_size"},
)
_add(
    "whisper",
    "WhisperForConditionalGeneration",
    spectra,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=20,
    suppress_tokens=None,
    begin_suppress_tokens=None,
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
)
_add(
    "speech_to_text",
    "Speech2TextForConditionalGeneration",
    lambda rows: {"input_features": normal(rows, 40, 8), "labels": integers(50, rows, 6, least=3)},
    input_feat_per_channel=8,
    input_channels=1,
    conv_channels=16,
    max_source_positions=40,
    max_target_positions=20,
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
)
_add_speech(
    "hubert",
    "HubertForSequenceClassification",
    lambda rows: {**waves(rows), "labels": torch.arange(rows) % 2},
    classifier_proj_size=8,
    **SPEECH,
)
_add_speech(
    "wavlm",
    "WavLMForSequenceClassification",
    lambda rows: {**waves(rows), "labels": torch.arange(rows) % 2},
    classifier_proj_size=8,
    num_buckets=8,
    max_bucket_distance=16,
    **SPEECH,
)
_add_speech(
    "unispeech",
    "UniSpeechForSequenceClassification",
    lambda rows: {**waves(rows), "labels": torch.arange(rows) % 2},
    classifier_proj_size=8,
    **SPEECH,
)
_add_speech(
    "sew",
    "SEWForSequenceClassification",
    lambda rows: {**waves(rows), "labels": torch.arange(rows) % 2},
    classifier_proj_size=8,
    **SPEECH,
)
_add_speech("data2vec audio", "Data2VecAudioModel", waves, conv_pos_kernel_size=3, **SPEECH)
_add(
    "audio spectrogram",
    "ASTForAudioClassification",
    lambda rows: {"input_values": normal(rows, 24, 16), "labels": torch.arange(rows) % 2},
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    patch_size=8,
    frequency_stride=8,
    time_stride=8,
    max_length=24,
    num_mel_bins=16,
)
_add(
    "patchtst",
    "PatchTSTForPrediction",
    series,
    num_input_channels=2,
    context_length=16,
    patch_length=4,
    patch_stride=4,
    prediction_length=4,
    d_model=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    ffn_dim=32,
)
_add(
    "patchtsmixer",
    "PatchTSMixerForPrediction",
    series,
    num_input_channels=2,
    context_length=16,
    patch_length=4,
    patch_stride=4,
    prediction_length=4,
    d_model=16,
    num_layers=2,
)
_add(
    "time_series",
    "TimeSeriesTransformerForPrediction",
    observed,
    prediction_length=4,
    context_length=12,
    lags_sequence=[1, 7],
    num_time_features=2,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
)
_add(
    "autoformer",
    "AutoformerForPrediction",
    observed,
    prediction_length=4,
    context_length=12,
    lags_sequence=[1, 7],
    num_time_features=2,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    modes=("train",),  # forecasting has its own way in
)
_add(
    "informer",
    "InformerForPrediction",
    observed,
    prediction_length=4,
    context_length=12,
    lags_sequence=[1, 7],
    num_time_features=2,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
)
_add(
    "encodec",
    "EncodecModel",
    lambda rows: {"input_values": normal(rows, 1, 64)},
    audio_channels=1,
    num_filters=4,
    upsampling_ratios=[2, 2],
    codebook_size=8,
    codebook_dim=16,
    hidden_size=16,
    num_lstm_layers=1,
    target_bandwidths=[1.5],
    sampling_rate=400,
    modes=("eval",),
)
_add(
    "vits",
    "VitsModel",
    lambda rows: {"input_ids": integers(20, rows, 8)},
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    ffn_dim=16,
    modes=("eval",),
)
