"""The work that is counted is what the compiled programs do, and the programs are the ones that are served."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.config import corrector_name
from lilicorr_jax.presets import tiny
from serve import bench
from serve.stages import StagesConfig, arguments, contestants, random_folded

TINY = StagesConfig(preset="tiny", rows=(2,), rounds=1)
WAYS = {way.name: way for way in contestants(TINY)}


def prepared(way, rows: int):
    rng = np.random.default_rng(0)
    logits, rest = arguments(TINY, rows, rng)
    folded = random_folded(way.corrector, tiny().target.vocab_size, rng)
    return {corrector_name(way.corrector): folded, "logits": logits}, rest


def products(jaxpr) -> int:
    """Multiply-adds of every dot_general in a program, those inside other programs included."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += int(np.prod(equation.outvars[0].aval.shape)) * int(np.prod([left[axis] for axis in contracted]))
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(part, "jaxpr", part)
                total += products(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize("name", WAYS)
def test_counted_products_are_those_of_the_traced_program(name):
    way = WAYS[name]
    for rows in (1, 3):
        params, rest = prepared(way, rows)
        traced = jax.make_jaxpr(way.run)(params, *rest)
        assert way.work(rows).products == products(traced.jaxpr)


def test_weights_of_a_rollout_are_read_again_in_every_slot():
    """Published sizes: 1.20 GB for Domino and 1.17 for DSpark in bfloat16, 15 drafts of one text."""
    public = {way.name: way for way in contestants(StagesConfig(preset="qwen3_8b"))}
    assert public["domino"].work(1).read_bytes(2) == pytest.approx(1.20e9, rel=0.01)
    assert public["dspark"].work(1).read_bytes(2) == pytest.approx(1.17e9, rel=0.01)
    assert public["domino"].work(1).flops == pytest.approx(1.22e9, rel=0.02)
    weights = public["lilicorr"].work(1).weights
    assert weights < 36_758_794 < 1.2 * weights  # what is folded into the token table is not read


def test_a_run_prints_every_method_and_one_json_line(capsys):
    assert bench.main(["--stages", "--preset=tiny", "--rows=2", "--rounds=1"]) == 0
    *text, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)["results"]
    assert [row["method"] for row in found] == list(WAYS)
    assert all(row["floor_ms"] > 0 and row["best_ms"] > 0 for row in found)
    assert sum("| domino |" in line for line in text) == 1


def test_an_empty_run_is_refused(capsys):
    assert bench.main(["--stages", "--rounds=0"]) == 2
    assert "got (1, 8, 32) and 0" in capsys.readouterr().err


def test_drafts_are_ids_of_the_vocabulary():
    way = WAYS["dspark sampled"]
    params, rest = prepared(way, 2)
    proposal = way.run(params, *rest)
    assert proposal.q.dtype == jnp.float32 and proposal.draft_ids.shape == (2, 5)
    np.testing.assert_allclose(proposal.q.sum(-1), 1, rtol=1e-5)
