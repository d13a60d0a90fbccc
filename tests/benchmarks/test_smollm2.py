"""SmolLM2-135M-Instruct as `make smollm2` writes it, against transformers' own answers; skipped where it is absent."""

import jax
import numpy as np
import pytest

from benchmarks.fetch import SOURCES, is_complete, model_folder
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.models.target import Target
from serve.engine import Engine, EngineConfig, Request
from serve.models import load_models
from serve.workload import load_tokenizer, templated
from tests.tolerance import TOLERANCES

FOLDER = model_folder("smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_complete(FOLDER, SOURCES["smollm2"]), reason=f"smollm2: {FOLDER} is not there; run make smollm2"
    ),
]
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def reference(golden) -> dict[str, np.ndarray]:
    return dict(np.load(golden / "smollm2" / "logits.npz"))


def test_the_tokenizer_gives_the_chat_prompt_of_transformers(reference):
    assert templated(load_tokenizer(FOLDER), QUESTION) == tuple(reference["prompt_ids"].tolist())


def test_logits_of_a_chat_prompt_are_those_of_transformers(reference):
    config, params = load_target(FOLDER)

    @jax.jit
    def logits_of(params, token_ids):
        model, tree = Target(config), {"params": params}
        return model.apply(tree, model.apply(tree, token_ids).hidden, method="unembed")

    logits = np.asarray(logits_of(params, reference["prompt_ids"][None]))[0]
    chosen = np.take_along_axis(logits, reference["token_ids"], axis=1)
    np.testing.assert_allclose(chosen, reference["logits"], rtol=0, atol=TOLERANCES["pretrained_logits"])
    np.testing.assert_array_equal(np.argmax(logits, axis=1), reference["token_ids"][:, 0])


def test_the_engine_names_the_capital_of_france(reference):
    engine = Engine(load_models(FOLDER), EngineConfig(rows=1, context_limit=80))
    (reply,) = engine.run([Request(id="0", prompt_ids=reference["prompt_ids"].tolist(), max_tokens=24)])
    assert reply.token_ids == tuple(reference["reply_ids"].tolist())
    assert load_tokenizer(FOLDER).decode(reply.token_ids[:-1]) == "The capital of France is Paris."
