"""Named sets of models that belong together: a target, its drafter, and a corrector of every kind for it.

`tiny` is for tests, `demo` is the shipped target's, the others are the paper's (Table 4).
"""

from dataclasses import dataclass, replace

from lilicorr_jax.config import (
    CorrectorConfig,
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    Method,
    RerankerConfig,
    RopeConfig,
    TargetConfig,
    default_target_layer_ids,
)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A target, the drafter that belongs to it, and every corrector that belongs to the drafter."""

    target: TargetConfig
    drafter: DrafterConfig
    reranker: RerankerConfig
    domino: DominoConfig
    dspark: DSparkConfig

    def for_method(self, method: Method) -> tuple[DrafterConfig, CorrectorConfig | None]:
        """The drafter and the corrector of a method.

        The drafters differ in rows and convention alone, so one seed gives all of them the same initial weights:
        Domino's row 0 drafts too and its last row is not used, DSpark has no row that does not draft.
        """
        rows = self.drafter.num_slots
        chosen: dict[Method, tuple[DrafterConfig, CorrectorConfig | None]] = {
            "dflash": (self.drafter, None),
            "lilicorr": (self.drafter, self.reranker),
            "domino": (replace(self.drafter, slot_convention="next", input_rows=rows + 1), self.domino),
            "dspark": (replace(self.drafter, slot_convention="next", input_rows=rows), self.dspark),
        }
        return chosen[method]


def drafter_of(target: TargetConfig, *, num_layers: int, mask_id: int, num_slots: int) -> DrafterConfig:
    """A drafter of the target's own shapes, which reads the layers of the public rule."""
    return DrafterConfig(
        vocab_size=target.vocab_size,
        width=target.width,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_width=target.head_width,
        ffn_width=target.ffn_width,
        max_positions=target.max_positions,
        rope=target.rope,
        norm_eps=target.norm_eps,
        dtype=target.dtype,
        num_target_layers=target.num_layers,
        target_layer_ids=default_target_layer_ids(target.num_layers, num_layers),
        mask_id=mask_id,
        input_rows=num_slots + 1,
        num_slots=num_slots,
    )


def _preset(
    target: TargetConfig,
    *,
    drafter_layers: int,
    mask_id: int,
    num_slots: int,
    reranker: dict | None = None,
    domino: dict | None = None,
    dspark: dict | None = None,
) -> Preset:
    drafter = drafter_of(target, num_layers=drafter_layers, mask_id=mask_id, num_slots=num_slots)
    shared: dict = dict(drafter_width=target.width, num_slots=num_slots, dtype=target.dtype)
    scoring = shared | dict(vocab_size=target.vocab_size)
    return Preset(
        target=target,
        drafter=drafter,
        reranker=RerankerConfig(norm_eps=target.norm_eps, **shared, **(reranker or {})),
        domino=DominoConfig(**scoring, **(domino or {})),
        dspark=DSparkConfig(**scoring, **(dspark or {})),
    )


def _qwen3(width: int, ffn_width: int, tie_embeddings: bool) -> Preset:
    target = TargetConfig(
        vocab_size=151_936,
        width=width,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_width=128,
        ffn_width=ffn_width,
        max_positions=40_960,
        tie_embeddings=tie_embeddings,
        eos_ids=(151_645, 151_643),
        dtype="bfloat16",
    )
    return _preset(target, drafter_layers=5, mask_id=151_669, num_slots=15)


def tiny() -> Preset:
    """Every axis has a size of its own, so that a test that runs at all has checked shapes."""
    target = TargetConfig(
        vocab_size=96,
        width=40,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_width=16,
        ffn_width=72,
        max_positions=256,
        rope=RopeConfig(theta=10_000.0),
        tie_embeddings=False,
        eos_ids=(1, 3),
        init_std=0.15,
    )
    return _preset(
        target,
        drafter_layers=2,
        mask_id=95,
        num_slots=5,
        reranker=dict(num_candidates=3, width=24, num_heads=2, ffn_width=56, factor_width=32),
        domino=dict(state_width=48, bottleneck_width=12),
        dspark=dict(rank=20),
    )


def demo() -> Preset:
    """The shipped demo target (see demo/README.md) with a drafter and correctors of its scale."""
    target = TargetConfig(
        vocab_size=512,
        width=128,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_width=32,
        ffn_width=320,
        max_positions=512,
        rope=RopeConfig(theta=10_000.0),
        tie_embeddings=True,
        eos_ids=(2, 0),
    )
    wide = dict(init_std=0.08)  # about 1 / sqrt(width): at this width 0.02 costs a short run a tenth of its loss
    preset = _preset(
        target,
        drafter_layers=2,
        mask_id=3,
        num_slots=15,
        reranker=dict(num_candidates=8, width=64, num_heads=2, ffn_width=128, factor_width=64, init="fan_in"),
        domino=dict(state_width=128, bottleneck_width=32, **wide),
        dspark=dict(rank=32, **wide),
    )
    return replace(preset, drafter=replace(preset.drafter, **wide))


def qwen3_4b() -> Preset:
    """Qwen3-4B, the paper's Table 4, and the published sizes of Domino and DSpark."""
    return _qwen3(width=2560, ffn_width=9728, tie_embeddings=True)


def qwen3_8b() -> Preset:
    """Qwen3-8B, the paper's Table 4, and the published sizes of Domino and DSpark."""
    return _qwen3(width=4096, ffn_width=12_288, tie_embeddings=False)


PRESETS = {"tiny": tiny, "demo": demo, "qwen3_4b": qwen3_4b, "qwen3_8b": qwen3_8b}
