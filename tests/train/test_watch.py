"""What a run shows of itself and what it may start from: event files, tau, the collapse alarm, a trained drafter."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

import train.loop as loop
import train.progress as progress
from lilicorr_jax.conversion.checkpoint import DrafterCheckpoint, abstract_drafter, save_drafter
from lilicorr_jax.losses.terms import metrics, spread_terms
from lilicorr_jax.presets import PRESETS
from serve.engine import Engine, EngineConfig, Request, assemble
from tests.train.texts import random_parameters
from train.progress import Reporter
from train.tau import Tau, padded, prompts_of
from train.warm import warm_params


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Every scalar of a folder's event files: frames of a length, its checksum, an event and its checksum."""
    found = []
    for path in sorted(folder.iterdir()):
        data, place = path.read_bytes(), 0
        while place < len(data):
            length = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            place += 16 + length
    return found


def test_event_files_hold_every_number_under_its_topic(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "memory", lambda: {"host_memory_gib": 2.0})
    with Reporter(tmp_path, 0, 10) as reporter:
        reporter.restart_clock()
        reporter.report(4, {"loss": 3.5, "drafter_gradient_norm": 0.25})
        reporter.report_held_out(4, {"loss": 4.0})
        reporter.report_decoded(4, {"tau": 2.5})
    assert scalars(tmp_path / "events") == [
        ("train/loss", 4, 3.5), ("train/drafter_gradient_norm", 4, 0.25), ("train/host_memory_gib", 4, 2.0),
        ("held_out/loss", 4, 4.0), ("decoded/tau", 4, 2.5),
    ]  # fmt: skip


def test_process_that_leaves_reports_to_another_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Reporter(None, 0, 10) as reporter:
        reporter.say("hello")
        reporter.advance(1, 5)
        reporter.report(1, {"loss": 1.0})
    assert not list(tmp_path.iterdir()) and capsys.readouterr().err == ""


def test_memory_is_at_least_what_an_array_takes():
    array = np.ones(2**27, np.uint8)  # an eighth of a GiB
    assert 0.125 < progress.memory()["host_memory_gib"] < 64 and array[0] == 1


@pytest.mark.parametrize(
    ("vectors", "spread"),
    [
        (np.broadcast_to([[1.0, 0.0]], (3, 4, 2)), 0.0),  # all alike: collapsed
        (np.broadcast_to(np.eye(4), (3, 4, 4)), 0.75),  # orthogonal
        (np.broadcast_to([[1.0, 0.0], [-1.0, 0.0]], (3, 2, 2)), 1.0),  # opposite
    ],
)
def test_spread_of_vectors_is_zero_only_where_they_are_alike(vectors, spread):
    vectors = jnp.asarray(vectors, jnp.float32)[None]  # [b, S, K, E]
    supervised = jnp.array([[True, False, True]])
    terms = spread_terms(vectors, vectors, supervised).replace(num_supervised=jnp.float32(2))
    np.testing.assert_allclose(metrics(terms)["factor_spread"], spread, atol=1e-6)
    apart = spread_terms(vectors.at[:, 1].set(0.5), vectors, supervised)  # a slot that does not count
    np.testing.assert_allclose(apart.spread_sum, terms.spread_sum, atol=1e-6)


@pytest.fixture(scope="module")
def run(config_for):
    return loop.prepare(config_for())


@pytest.fixture(scope="module")
def trained():
    """Random weights of the tiny drafter and reranker."""
    preset = PRESETS["tiny"]()
    return random_parameters(abstract_drafter(preset.drafter, preset.reranker), seed=5)


def test_tau_is_what_the_engine_measures_on_the_same_prompts(run, trained):
    found = Tau(run.objective, run.held_out, num_prompts=3, num_tokens=9).measure(trained, run.target_params)
    preset = PRESETS["tiny"]()
    models = assemble(
        run.objective.target, {"target": run.target_params, **trained}, drafter=preset.drafter,
        corrector=preset.reranker, method="lilicorr",
    )  # fmt: skip
    prompts = prompts_of(run.held_out, 3)
    requests = [Request(id=str(i), prompt_ids=tuple(map(int, ids)), max_tokens=9) for i, ids in enumerate(prompts)]
    blocks = [block for reply in Engine(models, EngineConfig(rows=3)).run(requests) for block in reply.blocks]
    assert found["tau"] == pytest.approx(sum(block.emitted for block in blocks) / len(blocks))
    assert found["accepted"] == pytest.approx(sum(block.accepted for block in blocks) / len(blocks))
    assert 1 <= found["tau"] <= 6


def test_prompt_is_what_stands_before_the_first_learned_token(run):
    for row, prompt in zip(range(4), prompts_of(run.held_out, 4), strict=True):
        text = run.held_out[row]
        assert len(prompt) == max(int(np.flatnonzero(text.loss_mask)[0]), 1)
        assert prompt.tolist() == text.token_ids[: len(prompt)].tolist()
    ids, lengths, max_tokens = padded([np.array([5, 6]), np.array([7])], 9, 4)
    assert ids.tolist() == [[5, 6], [7, 0], [0, 0], [0, 0]]
    assert (lengths.tolist(), max_tokens.tolist()) == ([2, 1, 1, 1], [9, 9, 1, 1])


def test_tau_that_the_models_have_no_positions_for_is_refused(run):
    with pytest.raises(ValueError, match="--tau_tokens=300 .* exceed the models' 256 positions"):
        Tau(run.objective, run.held_out, 3, 300)


@pytest.fixture(scope="module")
def public(tmp_path_factory, trained) -> Path:
    """A LiLiCorr folder as others publish it."""
    folder, preset = tmp_path_factory.mktemp("public") / "lilicorr", PRESETS["tiny"]()
    save_drafter(folder, DrafterCheckpoint(drafter=preset.drafter, corrector=preset.reranker, params=trained))
    dflash = DrafterCheckpoint(drafter=preset.drafter, corrector=None, params={"drafter": trained["drafter"]})
    save_drafter(folder.parent / "dflash", dflash)
    return folder


def fresh_like(trained):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)


def test_warm_start_takes_every_weight_of_a_public_folder(public, trained):
    preset = PRESETS["tiny"]()
    params, fresh = warm_params(str(public), preset.drafter, preset.reranker, fresh_like(trained))
    jax.tree.map(np.testing.assert_array_equal, params, trained)
    assert fresh == []


def test_warm_start_from_a_drafter_alone_leaves_the_reranker_fresh(public, trained):
    preset = PRESETS["tiny"]()
    params, fresh = warm_params(str(public.parent / "dflash"), preset.drafter, preset.reranker, fresh_like(trained))
    jax.tree.map(np.testing.assert_array_equal, params["drafter"], trained["drafter"])
    assert fresh == ["reranker"] and not any(np.any(leaf) for leaf in jax.tree.leaves(params["reranker"]))
    only, _ = warm_params(str(public), preset.drafter, None, {"drafter": fresh_like(trained)["drafter"]})
    jax.tree.map(np.testing.assert_array_equal, only, {"drafter": trained["drafter"]})


def test_warm_start_from_another_geometry_is_refused_field_by_field(public, trained):
    demo = PRESETS["demo"]()
    with pytest.raises(ValueError, match="drafter width is 40 there, 128 here; .*reranker num_candidates is 3 there"):
        warm_params(str(public), demo.drafter, demo.reranker, fresh_like(trained))
