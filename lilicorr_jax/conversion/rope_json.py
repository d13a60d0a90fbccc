"""Rotary settings in a config.json, in both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`."""

from dataclasses import replace

from lilicorr_jax.config import RopeConfig
from lilicorr_jax.conversion.fields import Fields

_UNDERSTOOD = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor",
}  # fmt: skip
_NEUTRAL = {"partial_rotary_factor": 1, "truncate": True}


def rope_from_json(fields: Fields, max_positions: int) -> RopeConfig:
    """Reads whichever spelling is there; ValueError when both are and they differ."""
    scaling, parameters = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    new_theta = parameters.number("rope_theta", None)
    old_theta = fields.number("rope_theta") if new_theta is None else fields.number("rope_theta", new_theta)
    old = _record(scaling, old_theta, max_positions)
    new = _record(parameters, old_theta if new_theta is None else new_theta, max_positions)
    if "rope_parameters" not in fields:
        return old
    if "rope_scaling" not in fields.mentioned:  # the old spelling speaks of theta alone
        old = replace(new, theta=old.theta)
    if old != new:
        raise ValueError(
            f"{fields.name} gives the rotary embedding twice and differently: {old} by rope_theta and rope_scaling, "
            f"{new} by rope_parameters. Keep the right one."
        )
    return new


def rope_to_json(rope: RopeConfig) -> dict:
    """Both spellings, so that older and newer readers find theirs."""
    scaling = None
    if rope.yarn_factor is not None:
        scaling = {
            "rope_type": "yarn",
            "factor": rope.yarn_factor,
            "original_max_position_embeddings": rope.yarn_original_positions,
            "beta_fast": rope.yarn_beta_fast,
            "beta_slow": rope.yarn_beta_slow,
        }
        if rope.yarn_attention_factor is not None:
            scaling["attention_factor"] = rope.yarn_attention_factor
    parameters = {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _record(scaling: Fields, theta: float, max_positions: int) -> RopeConfig:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "yarn"):
        raise NotImplementedError(f"{scaling.name} asks for rotary type {kind!r}; 'default' and 'yarn' are computed.")
    odd = {k: v for k, v in scaling.values.items() if k not in _UNDERSTOOD and v != _NEUTRAL.get(k)}
    if odd:
        raise NotImplementedError(f"{scaling.name} has settings that are not computed here: {odd}.")
    if kind == "default":
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        yarn_factor=scaling.number("factor"),
        yarn_original_positions=scaling.integer("original_max_position_embeddings", max_positions),
        yarn_beta_fast=scaling.number("beta_fast", RopeConfig.yarn_beta_fast),
        yarn_beta_slow=scaling.number("beta_slow", RopeConfig.yarn_beta_slow),
        yarn_attention_factor=scaling.number("attention_factor", None),
    )
