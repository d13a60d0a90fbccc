"""What regeneration writes is read by those who use it."""

import numpy as np
import pytest

from demo import corpus, regenerate
from lilicorr_jax.flags import run_main
from serve.workload import read_prompts
from train.tokens import read_token_file


def test_a_token_file_gives_back_prompts_and_replies(tmp_path):
    prompts, answers = [[1, 2, 3], [4]], [[5, 2], [6, 7, 511, 2]]
    regenerate.write_token_file(tmp_path / "replies.npz", prompts, answers, ["math", "sort"])
    file = read_token_file(tmp_path / "replies.npz", vocab_size=512)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = file.tokens[file.offsets[row] : file.offsets[row + 1]].tolist()
        assert (tokens[: file.prompt_lengths[row]], tokens[file.prompt_lengths[row] :]) == (prompt, answer)
    with np.load(tmp_path / "replies.npz") as arrays:
        assert arrays["category"].tolist() == ["math", "sort"] and arrays["tokens"].dtype == np.uint16


def test_heldout_prompts_are_read_by_the_workload(tmp_path):
    records = [corpus.Record(category=name, prompt=f'{name}, \n"q"?', reply="") for name in ("math", "sort")]
    regenerate.write_heldout(tmp_path / "heldout.jsonl", records)
    found = read_prompts(tmp_path / "heldout.jsonl")
    assert [(prompt.category, prompt.text) for prompt in found] == [(r.category, r.prompt) for r in records]


@pytest.mark.parametrize(
    ("argument", "told"), [("--replies=30", "got 30"), ("--heldout=0", "got 0"), ("--held=1", "held")]
)
def test_a_wrong_command_line_is_told_in_one_sentence(argument, told, capsys):
    assert run_main(regenerate.RegenerateConfig, regenerate.run, program="demo.regenerate", arguments=[argument]) == 2
    assert told in capsys.readouterr().err
