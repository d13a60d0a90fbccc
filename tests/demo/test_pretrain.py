"""Pretraining: the loss is a weighted mean, a resumed run equals an uninterrupted one, flags are checked."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from demo import corpus, pretrain, rows
from demo import tokenizer as demo_tokenizer
from lilicorr_jax import presets
from lilicorr_jax.flags import run_main
from lilicorr_jax.models.target import Target
from lilicorr_jax.sharding import init_parameters


@pytest.fixture(scope="module")
def target():
    return Target(dataclasses.replace(presets.tiny().target, vocab_size=512, num_layers=1, init_std=0.08))


@pytest.fixture(scope="module")
def tokenizer():
    records = itertools.islice(corpus.records("pretrain", seed=0), 300)
    return demo_tokenizer.train(text for record in records for text in (record.prompt, record.reply))


@jax.jit(static_argnums=0)
def logits_of(target, params, token_ids):
    return target.apply({"params": params}, target.apply({"params": params}, token_ids).hidden, method="unembed")


def test_the_loss_is_the_weighted_mean_over_all_rows(target, rng):
    params = init_parameters(target, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    groups = [
        rows.Rows(
            token_ids=jnp.array(rng.integers(0, 512, shape), jnp.int32),
            weights=jnp.array(rng.random(shape), jnp.float32),
        )
        for shape in ((2, 5), (1, 8))
    ]
    total = weight = 0.0
    for group in jax.device_get(groups):
        logits = np.asarray(logits_of(target, params, jnp.array(group.token_ids)), np.float64)
        for row, position in np.ndindex(group.token_ids.shape[0], group.token_ids.shape[1] - 1):
            scores = logits[row, position]
            label, share = group.token_ids[row, position + 1], group.weights[row, position + 1]
            total += share * (np.log(np.exp(scores).sum()) - scores[label])
            weight += share
    loss = jax.jit(lambda p, g: pretrain.loss(target, p, g))(params, groups)
    assert float(loss) == pytest.approx(total / weight, rel=2e-6)


def test_decay_touches_matrices_alone():
    params = {"kernel": jnp.ones((2, 2)), "weight": jnp.ones(2)}
    update = pretrain.optimizer(10, 0.1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = update.init(params)
    _, state = update.update(zeros, state, params)  # the first step of the warm-up has rate 0
    change, _ = update.update(zeros, state, params)
    assert float(change["kernel"].max()) < 0 and not change["weight"].any()


def test_a_killed_run_goes_on_as_if_nothing_had_happened(target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "ROWS_OF_WIDTH", {128: 2})
    looks = []

    def look(_target, _params, _tokenizer):
        looks.append(1)
        return "looked"

    settings = pretrain.PretrainConfig(output="unused", checkpoints=str(tmp_path), steps=4, save_every=2, watch_every=3)
    whole = jax.device_get(pretrain.train(target, tokenizer, settings, look))
    shutil.rmtree(tmp_path / "4")
    resumed = jax.device_get(pretrain.train(target, tokenizer, settings, look))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert len(looks) == 4, "at step 3 and at the last one, in both runs"


def test_progress_tells_speed_and_time_left(monkeypatch):
    progress = pretrain.Progress(100, 500, 50.0)
    monkeypatch.setattr(pretrain.time, "monotonic", lambda: 110.0)
    assert progress.line(200, 1.5, 300) == "step 200/500 loss 1.5000, 500 tok/s, 3.0 min left"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--output=x", "--steps=0"], "--steps must be positive; got 0"),
        (["--output=x", "--stepz=3"], "stepz"),
        (["--output=x", "twice"], "'twice'"),
        ([], "--output must be given"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_sentence(arguments, told, capsys):
    assert run_main(pretrain.PretrainConfig, pretrain.run, program="demo.pretrain", arguments=arguments) == 2
    assert told in capsys.readouterr().err
