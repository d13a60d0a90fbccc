"""config.json of others becomes our records, or a sentence that names what is wrong with it."""

import dataclasses
import json
import re

import pytest
import transformers

from lilicorr_jax import presets
from lilicorr_jax.config import RopeConfig
from lilicorr_jax.conversion.config_json import (
    drafter_from_json,
    drafter_to_json,
    generation_to_json,
    target_from_json,
    target_to_json,
)
from tests.conversion.configs import DFLASH, DOMINO, DSPARK, LILICORR, LLAMA, QWEN2, TARGET, YARN, changed


def test_a_qwen3_target_is_read_field_by_field():
    ours = target_from_json(TARGET)
    assert (ours.width, ours.num_heads, ours.num_kv_heads, ours.head_width) == (48, 4, 2, 16)
    assert (ours.num_layers, ours.ffn_width, ours.vocab_size, ours.max_positions) == (6, 128, 199, 512)
    assert (ours.norm_eps, ours.rope, ours.dtype) == (1e-6, RopeConfig(theta=1e6), "float32")
    assert ours.qk_norm and ours.tie_embeddings and not ours.attention_bias
    assert ours.eos_ids == (7,)


def test_llama_and_qwen2_are_read_by_their_switches():
    llama, qwen2 = target_from_json(LLAMA), target_from_json(QWEN2)
    assert (llama.qk_norm, llama.attention_bias, llama.head_width, llama.rope.theta) == (False, False, 64, 1e5)
    assert (qwen2.qk_norm, qwen2.attention_bias, qwen2.head_width, qwen2.dtype) == (False, True, 64, "bfloat16")


@pytest.mark.parametrize("base", [TARGET, LLAMA, QWEN2], ids=lambda base: base["model_type"])
def test_targets_survive_a_round_trip(base):
    ours = target_from_json(base)
    written = target_to_json(ours)
    assert written["architectures"] == base["architectures"] and written["model_type"] == base["model_type"]
    assert target_from_json(written, generation_to_json(ours)) == ours


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_survive_a_round_trip(preset):
    ours = presets.PRESETS[preset]()
    assert target_from_json(target_to_json(ours.target), generation_to_json(ours.target)) == ours.target
    # The public layout has no word for the reranker's own start.
    reranker = dataclasses.replace(ours.reranker, init="normal", init_std=ours.drafter.init_std)
    written = json.loads(json.dumps(drafter_to_json(ours.drafter, reranker)))
    assert drafter_from_json(written) == (ours.drafter, reranker)
    assert drafter_from_json(drafter_to_json(ours.drafter)) == (ours.drafter, None)
    for method in ("domino", "dspark"):
        drafter, corrector = ours.for_method(method)
        written = json.loads(json.dumps(drafter_to_json(drafter, corrector)))
        assert drafter_from_json(written) == (drafter, dataclasses.replace(corrector, init_std=drafter.init_std))


def test_transformers_reads_what_we_write():
    preset = presets.qwen3_8b()
    rope = RopeConfig(theta=5e5, yarn_factor=4.0, yarn_original_positions=32768, yarn_attention_factor=1.25)
    for written in (target_to_json(preset.target), drafter_to_json(preset.drafter, preset.reranker)):
        theirs = transformers.Qwen3Config(**written)
        assert theirs.rope_parameters == {"rope_theta": 1e6, "rope_type": "default"}
        assert (theirs.hidden_size, theirs.head_dim, theirs.num_key_value_heads) == (4096, 128, 8)
        assert theirs.rms_norm_eps == 1e-6 and set(theirs.layer_types) == {"full_attention"}
    theirs = transformers.Qwen3Config(**target_to_json(dataclasses.replace(preset.target, rope=rope)))
    assert theirs.rope_parameters["factor"] == 4.0 and theirs.rope_parameters["attention_factor"] == 1.25
    assert theirs.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    "generation, ids",
    [
        ({"eos_token_id": [7, 9]}, (7, 9)),
        ({"eos_token_id": 9}, (9,)),
        ({"eos_token_id": None}, (7,)),
        ({}, (7,)),
        (None, (7,)),
    ],
)
def test_end_ids_of_the_generation_config_go_first(generation, ids):
    assert target_from_json(TARGET, generation).eos_ids == ids


def test_every_end_id_is_written():
    ours = dataclasses.replace(presets.demo().target, eos_ids=(2, 0))
    assert generation_to_json(ours) == {"eos_token_id": [2, 0]}
    assert target_from_json(changed(TARGET, eos_token_id=[7, 9])).eos_ids == (7, 9)


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_a_field_of_the_drafter_is_read_from_either_place(key):
    value = DFLASH.get(key, DFLASH["dflash_config"].get(key))
    want, _ = drafter_from_json(DFLASH)
    nested = f"dflash_config__{key}"
    for places in ({key: value, nested: ...}, {key: ..., nested: value}, {key: value, nested: value}):
        assert drafter_from_json(changed(DFLASH, **places))[0] == want
    other = [1, 2] if key == "target_layer_ids" else value - 1
    with pytest.raises(ValueError, match=f"{key} is given twice.*{re.escape(str(other))}"):
        drafter_from_json(changed(DFLASH, **{key: value, nested: other}))
    with pytest.raises(ValueError, match=f"lacks {key}"):
        drafter_from_json(changed(DFLASH, **{key: ..., nested: ...}))


def test_a_block_of_six_rows_drafts_five_tokens():
    drafter, reranker = drafter_from_json(LILICORR)
    assert (drafter.input_rows, drafter.num_slots, drafter.verify_rows, reranker.num_slots) == (6, 5, 6, 5)
    assert (drafter.target_layer_ids, drafter.mask_id, drafter.num_target_layers) == ((1, 2, 3, 4, 5), 96, 8)


def test_the_reranker_is_read_key_by_key():
    _, reranker = drafter_from_json(changed(LILICORR, dflash_config__lilicorr_mlp_ratio=1.5))
    assert (reranker.num_candidates, reranker.width, reranker.num_layers, reranker.num_heads) == (4, 32, 2, 4)
    assert (reranker.ffn_width, reranker.factor_width) == (48, 32)
    assert (reranker.vector_floor, reranker.cosine_scale, reranker.norm_eps) == (1e-4, 8.0, 1e-6)
    _, wide = drafter_from_json(changed(LILICORR, dflash_config__lilicorr_hidden_size=0))
    assert wide.width == 64


LILICORR_KEYS = [
    key for key in LILICORR["dflash_config"] if key.startswith("lilicorr_") and not key.endswith("enabled")
]


@pytest.mark.parametrize("key", LILICORR_KEYS)
def test_no_key_of_the_reranker_has_a_default(key):
    with pytest.raises(ValueError, match=f"lacks {key}"):
        drafter_from_json(changed(LILICORR, **{f"dflash_config__{key}": ...}))


def test_domino_is_read_key_by_key():
    """A block of six rows, of which "shift_label" says which speak: rows 0 to 4 for slots 1 to 5, or rows 1 to 5."""
    drafter, domino = drafter_from_json(DOMINO)
    assert (drafter.input_rows, drafter.num_slots, drafter.slot_convention) == (6, 5, "next")
    assert (domino.state_width, domino.bottleneck_width, domino.plain_slots, domino.num_slots) == (32, 16, 1, 5)
    assert (domino.drafter_width, domino.vocab_size) == (64, 199)
    unshifted, _ = drafter_from_json(changed(DOMINO, dflash_config__shift_label=False))
    assert (unshifted.input_rows, unshifted.num_slots, unshifted.slot_convention) == (6, 5, "same")
    early = changed(DOMINO, architectures=["DFlashDraftModel"], emb_dim=...)
    assert drafter_from_json(early) == (drafter, domino)


def test_dspark_is_read_in_both_dialects():
    """A block of six rows drafts six tokens: its first row speaks for the position behind the anchor."""
    drafter, dspark = drafter_from_json(DSPARK)
    assert (drafter.input_rows, drafter.num_slots, drafter.slot_convention) == (6, 6, "next")
    assert (dspark.rank, dspark.kind, dspark.has_confidence, dspark.confidence_reads_token) == (
        16,
        "vanilla",
        True,
        True,
    )
    assert (dspark.num_slots, dspark.drafter_width, dspark.vocab_size) == (6, 64, 199)
    moved = ("mask_token_id", "target_layer_ids", *(key for key in DSPARK if "markov" in key or "confidence" in key))
    nested = {key: DSPARK[key] for key in moved} | {"projector_type": "dspark", "confidence_head_alpha": 1.0}
    dialect = changed(DSPARK, architectures=["DSparkDraftModel"], dflash_config=nested, **dict.fromkeys(moved, ...))
    assert drafter_from_json(dialect) == (drafter, dspark)
    without = changed(dialect, dflash_config__enable_confidence_head=False)
    assert not drafter_from_json(without)[1].has_confidence


def test_the_written_configs_of_domino_and_dspark_have_the_public_keys():
    written = drafter_to_json(*drafter_from_json(DOMINO))
    assert written["dflash_config"] == DOMINO["dflash_config"]
    assert {key: written[key] for key in DOMINO} == DOMINO
    written = drafter_to_json(*drafter_from_json(DSPARK))
    assert written["architectures"] == ["DSparkDraftModel"] and written["block_size"] == 6
    assert written["dflash_config"]["projector_type"] == "dspark" and written["dflash_config"]["shift_label"] is True


@pytest.mark.parametrize(
    ("base", "key"),
    [
        *((DOMINO, f"dflash_config__{key}") for key in ("shift_label", "gru_hidden_dim", "pure_draft_prefix_len")),
        *((DSPARK, key) for key in ("markov_rank", "markov_head_type", "enable_confidence_head")),
        (DSPARK, "confidence_head_with_markov"),
    ],
)
def test_no_key_of_domino_or_dspark_has_a_default(base, key):
    with pytest.raises(ValueError, match=f"lacks {key.split('__')[-1]}"):
        drafter_from_json(changed(base, **{key: ...}))


def test_all_absent_keys_are_named_at_once():
    with pytest.raises(ValueError, match="markov_rank, markov_head_type"):
        drafter_from_json(changed(DSPARK, markov_rank=..., markov_head_type=...))
    with pytest.raises(ValueError, match=", ".join(LILICORR_KEYS)):
        drafter_from_json(changed(LILICORR, **{f"dflash_config__{key}": ... for key in LILICORR_KEYS}))
    with pytest.raises(ValueError, match="hidden_size, num_attention_heads"):
        target_from_json(changed(TARGET, hidden_size=..., num_attention_heads=...))


def test_a_disabled_reranker_is_none():
    assert drafter_from_json(changed(LILICORR, dflash_config__lilicorr_enabled=False))[1] is None
    assert drafter_from_json(changed(DFLASH, dflash_config__lilicorr_enabled=False))[1] is None


WRONG = [  # base, changes, what the sentence names
    (DFLASH, {"mask_token_id": 199, "dflash_config__mask_token_id": ...}, "199"),
    (DFLASH, {"dflash_config__mask_token_id": -1}, "-1"),
    (DFLASH, {"dflash_config__target_layer_ids": [1, 5]}, "(1, 5)"),
    (DFLASH, {"dflash_config__target_layer_ids": [1, "3"]}, "'3'"),
    (DFLASH, {"block_size": 1}, "got 1"),
    (DFLASH, {"block_size": 6.0}, "6.0"),
    (DFLASH, {"block_size": True}, "True"),
    (DFLASH, {"num_target_layers": ...}, "num_target_layers"),
    (DFLASH, {"dflash_config": [1]}, "[1]"),
    (DFLASH, {"architectures": ["LiLiCorrDraftModel"]}, "lilicorr_candidate_topk"),
    (LILICORR, {"architectures": ["DFlashDraftModel"]}, "'DFlashDraftModel'"),
    (DFLASH, {"dflash_config__lilicorr_enabled": True}, "'DFlashDraftModel'"),
    (DFLASH, {"dflash_config__projector_type": "dspark"}, "['DSparkDraftModel']"),
    (LILICORR, {"dflash_config__projector_type": "domino"}, "['DominoDraftModel']"),
    (
        DOMINO,
        {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "domino"}},
        "DominoDraftModel",
    ),
    (DOMINO, {"emb_dim": 8}, "8 in config.json and 16"),
    (DOMINO, {"dflash_config__pure_draft_prefix_len": 6}, "got 6"),
    (DOMINO, {"dflash_config__gru_hidden_dim": 0}, "got 0"),
    (DSPARK, {"shift_label": False}, "shift_label is False"),
    (DSPARK, {"markov_rank": 0}, "got 0"),
    (LILICORR, {"dflash_config__lilicorr_candidate_topk": 17}, "17"),
    (LILICORR, {"dflash_config__lilicorr_candidate_topk": 0}, "got 0"),
    (LILICORR, {"dflash_config__lilicorr_num_heads": 5}, "got 5"),
    (LILICORR, {"dflash_config__lilicorr_vector_eps": 0.5}, "0.5"),
    (LILICORR, {"dflash_config__lilicorr_logit_scale": 0}, "0.0"),
    (LILICORR, {"dflash_config__lilicorr_mlp_ratio": "2"}, "'2'"),
    (TARGET, {"num_hidden_layers": 10**9}, "1000000000"),
    (TARGET, {"hidden_size": 2**40}, "1099511627776"),
    (TARGET, {"num_key_value_heads": 3}, "3 and 4"),
    (TARGET, {"num_key_value_heads": 0}, "got 0"),
    (TARGET, {"head_dim": ...}, "head_dim"),
    (TARGET, {"head_dim": 15}, "15"),
    (TARGET, {"rms_norm_eps": 0}, "0.0"),
    (TARGET, {"dtype": "float16"}, "float16"),
    (TARGET, {"dtype": ...}, "none"),
    (TARGET, {"torch_dtype": "bfloat16"}, "bfloat16 and float32"),
    (TARGET, {"eos_token_id": 199}, "199"),
    (TARGET, {"eos_token_id": "7"}, "'7'"),
    (TARGET, {"tie_word_embeddings": "yes"}, "'yes'"),
    (TARGET, {"model_type": ...}, "model_type"),
]


@pytest.mark.parametrize(
    "base, changes, value", WRONG, ids=[f"{k}-{v}" for _, c, _ in WRONG for k, v in [*c.items()][:1]]
)
def test_a_wrong_value_is_refused_by_name(base, changes, value):
    read = target_from_json if base is TARGET else drafter_from_json
    with pytest.raises(ValueError, match=re.escape(value)):
        read(changed(base, **changes))


UNCOMPUTED = [
    (TARGET, {"model_type": "qwen3_moe"}, "qwen3_moe"),
    (TARGET, {"attention_bias": True}, "attention_bias"),
    (TARGET, {"hidden_act": "gelu"}, "gelu"),
    (TARGET, {"use_sliding_window": True}, "use_sliding_window"),
    (TARGET, {"use_sliding_window": True, "sliding_window": 4096}, "4096"),
    (TARGET, {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "sliding_attention"),
    (TARGET, {"layer_types": ["full_attention"] * 5}, "layer_types"),
    (TARGET, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3'"),
    (TARGET, {"rope_scaling": {**YARN, "mscale": 0.7}}, "mscale"),
    (TARGET, {"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
    (TARGET, {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    (TARGET, {"final_logit_softcapping": 30.0}, "30.0"),
    (TARGET, {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    (TARGET, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (TARGET, {"attention_sink_bias": True}, "attention_sink_bias"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias"),
    (LLAMA, {"attention_bias": True}, "attention_bias"),
    (DFLASH, {"use_sliding_window": ..., "sliding_window": 16}, "'sliding_window': 16"),
    (DFLASH, {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    (DFLASH, {"architectures": ...}, "None"),
    (DFLASH, {"model_type": "llama"}, "llama"),
    (DFLASH, {"dflash_config__projector_type": "dspine"}, "dspine"),
    (DOMINO, {"dflash_config__use_bias_norm": True}, "use_bias_norm"),
    (DSPARK, {"draft_vocab_size": 32}, "32"),
    (DSPARK, {"markov_head_type": "linear"}, "'linear'"),
    (DFLASH, {"dflash_config__selector_rank": 256}, "selector_rank"),
    (DFLASH, {"dflash_config__causal": True}, "causal"),
    (DFLASH, {"draft_vocab_size": 32}, "32"),
    (LILICORR, {"dflash_config__conv_kernel_size": 2, "dflash_config__conv_group_size": 16}, "conv_kernel_size"),
    (LILICORR, {"lilicorr_num_layers": 2}, "lilicorr_num_layers"),
    (LILICORR, {"has_own_lm_head": True}, "has_own_lm_head"),
]


@pytest.mark.parametrize("base, changes, value", UNCOMPUTED, ids=[f"{list(c)[0]}-{v}" for _, c, v in UNCOMPUTED])
def test_a_setting_that_changes_the_mathematics_is_refused_by_name(base, changes, value):
    read = target_from_json if base["model_type"] == "llama" or base is TARGET else drafter_from_json
    with pytest.raises(NotImplementedError, match=re.escape(value)):
        read(changed(base, **changes))


@pytest.mark.parametrize(
    "neutral",
    [
        {"quantization_config": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"attention_sink_bias": False},
        {"draft_vocab_size": 199},
        {"transformers_version": "9.9", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}},
        {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.0}},
    ],
)
def test_a_setting_without_effect_is_read_over(neutral):
    assert drafter_from_json(changed(DFLASH, **neutral)) == drafter_from_json(DFLASH)


def test_a_named_dtype_goes_before_the_files():
    half = changed(TARGET, dtype="float16")
    assert target_from_json(half, dtype="bfloat16").dtype == "bfloat16"
    assert drafter_from_json(LILICORR, dtype="bfloat16")[1].dtype == "bfloat16"


def test_the_written_lilicorr_config_has_the_public_keys():
    written = drafter_to_json(*drafter_from_json(LILICORR))
    assert written.keys() == LILICORR.keys() | {"rope_parameters"}
    assert written["dflash_config"] == LILICORR["dflash_config"]
    assert {key: written[key] for key in LILICORR} == LILICORR


def test_the_ratio_written_gives_back_every_ffn_width():
    _, reranker = drafter_from_json(LILICORR)
    drafter, _ = drafter_from_json(LILICORR)
    for width in (32, 24, 56, 1024):
        for ffn_width in (1, 7, 49, 55, 111, 1000, 2047):
            head = dataclasses.replace(reranker, width=width, ffn_width=ffn_width)
            assert drafter_from_json(drafter_to_json(drafter, head))[1].ffn_width == ffn_width


@pytest.mark.parametrize(
    "field, value, kind",
    [
        ("num_slots", 4, NotImplementedError),
        ("slot_convention", "next", NotImplementedError),
        ("qk_norm", False, NotImplementedError),
        ("norm_eps", 1e-5, ValueError),
        ("dtype", "bfloat16", ValueError),
        ("width", 32, ValueError),
    ],
)
def test_what_the_public_layout_cannot_say_is_not_written(field, value, kind):
    drafter, reranker = drafter_from_json(LILICORR)
    with pytest.raises(kind, match=str(value)):
        drafter_to_json(dataclasses.replace(drafter, **{field: value}), reranker)


@pytest.mark.parametrize(
    "base, changes, value",
    [
        (DOMINO, {"num_slots": 6}, "6 slots from 6 rows"),
        (DOMINO, {"vocab_size": 200}, "200"),
        (DSPARK, {"slot_convention": "same", "num_slots": 5}, "'same'"),
        (DSPARK, {"num_slots": 5}, "5 slots from 6 rows"),
        (DSPARK, {"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_rows_and_slots_that_a_layout_cannot_say_are_not_written(base, changes, value):
    drafter, corrector = drafter_from_json(base)
    with pytest.raises((ValueError, NotImplementedError), match=value):
        drafter_to_json(dataclasses.replace(drafter, **changes), corrector)
