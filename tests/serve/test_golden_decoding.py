"""The reference's greedy runs, token for token and block for block: a Qwen3 target with a trained DFlash drafter."""

import json
from dataclasses import replace

import pytest

from serve.engine import Engine, EngineConfig, Request, load_models
from tests.tolerance import assert_same_text

TRAINED = 6
ROOM = 64  # cache rows, whatever the block size


@pytest.fixture(scope="module")
def pair(request):
    """The folder's runs by block size, and a function that serves one block size's runs in one ragged batch."""
    folder = request.getfixturevalue("golden") / "dflash" / request.param
    models = load_models(folder / "target", folder / "drafter", method="dflash")
    runs = json.loads((folder / "spec_generate.json").read_text())["runs"]
    runs = [run for run in runs if not run["name"].startswith("quirk")]

    def serve(block_size: int):
        if block_size == 1:
            chosen = replace(models, method="ar")
        else:
            drafter = replace(models.drafter, input_rows=block_size, num_slots=block_size - 1)
            chosen = replace(models, drafter=drafter)
        mine = [run for run in runs if run["block_size"] == block_size]
        config = EngineConfig(rows=len(mine), context_limit=ROOM - block_size, smallest_bucket=16)
        asked = [
            Request(
                id=run["name"],
                prompt_ids=run["prompt"],
                max_tokens=run["max_new_tokens"],
                stop_ids=run["stop_token_ids"] or (),
            )
            for run in mine
        ]
        return list(zip(mine, Engine(chosen, config).run(asked), strict=True))

    return serve


@pytest.mark.parametrize(
    ("pair", "block_size", "num_runs"),
    [
        ("untied", TRAINED, 10),
        ("untied", 4, 1),
        ("untied", 1, 1),
        ("tied", TRAINED, 10),
        pytest.param("tied", 4, 1, marks=pytest.mark.slow),
        pytest.param("tied", 1, 1, marks=pytest.mark.slow),
    ],
    indirect=["pair"],
)
def test_every_run_gives_the_references_ids_and_acceptance_lengths(pair, block_size, num_runs):
    served = pair(block_size)
    assert len(served) == num_runs
    for run, reply in served:
        assert_same_text(reply.token_ids, run["output_ids"][len(run["prompt"]) :])
        lengths = [block.accepted + 1 for block in reply.blocks]
        assert lengths == run["acceptance_lengths"][: len(lengths)]
        is_stopped = reply.token_ids[-1] in (run["stop_token_ids"] or ())
        assert reply.finish_reason == ("stop" if is_stopped else "length")
        assert all(block.proposed == block_size - 1 for block in reply.blocks)
    if block_size == TRAINED:  # the runs end in every way and accept every number of drafts
        assert {reply.finish_reason for _, reply in served} == {"stop", "length"}
        assert {block.accepted for _, reply in served for block in reply.blocks} == set(range(TRAINED))
        assert any(not reply.blocks for _, reply in served)  # the prefill's token may be the stop
