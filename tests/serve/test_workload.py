"""Prompt files, the choice of prompts, and the chat template."""

import json
from collections import Counter

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from demo import tokenizer as demo_tokenizer
from serve import workload


@pytest.fixture
def prompt_file(tmp_path):
    def write(*rows) -> str:
        path = tmp_path / "gsm8k.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


def a_prompt(index: int, category: str = "all") -> workload.Prompt:
    return workload.Prompt(id=f"{category}-{index}", category=category, text=f"What is {index}?")


def test_a_row_keeps_its_id_category_and_first_turn(prompt_file):
    (prompt,) = workload.read_prompts(prompt_file({"id": 7, "category": "math", "turns": ["One?", "Two?"], "x": 1}))
    assert prompt == workload.Prompt(id="7", category="math", text="One?", num_turns=2)


def test_the_public_form_gets_line_numbers_and_the_file_name(prompt_file):
    prompts = workload.read_prompts(prompt_file({"turns": ["One?"]}, "", {"turns": ["Zwei\u2028?"]}))
    assert [(p.id, p.category, p.text) for p in prompts] == [("1", "gsm8k", "One?"), ("3", "gsm8k", "Zwei\u2028?")]


def test_every_malformed_row_is_reported_with_its_line(prompt_file):
    path = prompt_file(
        {"id": "a", "turns": ["Good?"]},
        "{not json",
        ["a list"],
        {"turns": "One?"},
        {"turns": []},
        {"turns": [" \n"]},
        {"turns": ["?"], "category": 1.5},
        {"id": "a", "turns": ["Again?"]},
    )
    with pytest.raises(ValueError) as error:
        workload.read_prompts(path)
    sentence = str(error.value)
    assert "7 malformed rows" in sentence
    for line, reason in {2: "not JSON", 3: "JSON list", 4: "One?", 5: "[]", 6: "empty", 7: "1.5", 8: "line 1"}.items():
        (part,) = [part for part in sentence.split("; ") if f"line {line}: " in part]
        assert reason in part


def test_a_long_report_counts_what_it_does_not_show(prompt_file):
    with pytest.raises(ValueError, match=r"14 malformed rows.*and 4 more"):
        workload.read_prompts(prompt_file(*["nothing"] * 14))


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_prompts_is_refused(prompt_file, content):
    with pytest.raises(ValueError, match="gsm8k.jsonl holds no prompts"):
        workload.read_prompts(prompt_file(content))


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="nowhere.jsonl"):
        workload.read_prompts(tmp_path / "nowhere.jsonl")


def test_the_sample_is_even_over_categories_as_far_as_they_reach():
    prompts = [a_prompt(i, "many") for i in range(50)] + [a_prompt(i, "some") for i in range(5)] + [a_prompt(0, "one")]
    chosen = workload.choose(prompts, 13, seed=0)
    assert Counter(p.category for p in chosen) == {"many": 7, "some": 5, "one": 1}
    assert len(set(chosen)) == 13 and set(chosen) <= set(prompts)
    assert len({p.category for p in chosen[:3]}) == 3  # categories take turns


def test_the_sample_is_a_function_of_the_seed_and_not_the_first_rows():
    prompts = [a_prompt(i) for i in range(100)]
    samples = [workload.choose(prompts, 10, seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert set(samples[0]) != set(prompts[:10])


def test_all_prompts_are_taken_without_a_count():
    prompts = [a_prompt(i) for i in range(5)]
    assert sorted(p.id for p in workload.choose(prompts, None, seed=3)) == [p.id for p in prompts]


@pytest.mark.parametrize("count", [0, -1, 6])
def test_a_count_outside_the_file_is_refused(count):
    with pytest.raises(ValueError, match=f"between 1 and the 5 prompts.*got {count}"):
        workload.choose([a_prompt(i) for i in range(5)], count, seed=0)


def test_the_digest_changes_with_text_order_and_id():
    one, two = a_prompt(1), a_prompt(2)
    renamed = workload.Prompt(id="other", category=one.category, text=one.text)
    digests = [workload.digest(sample) for sample in ([one, two], [two, one], [one], [renamed, two], [one, two])]
    assert len(set(digests)) == 4 and digests[0] == digests[4]
    assert len(digests[0]) == 64


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    """A tokenizer folder of the demo's kind, trained on two sentences."""
    folder = tmp_path_factory.mktemp("target")
    trained = demo_tokenizer.train(["a small text about nothing", "another small text"])
    demo_tokenizer.write(trained, folder, context=512)
    return folder


def test_the_prompt_is_written_in_the_chat_template_up_to_the_reply(demo_folder):
    tokenizer = workload.load_tokenizer(demo_folder)
    ids = workload.templated(tokenizer, "a small text?")
    assert tokenizer.decode(ids) == "<|im_start|>user\na small text?<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1 and ids.count(2) == 1  # special tokens, not their spelling


def test_thinking_is_off_where_the_template_knows_it(demo_folder):
    tokenizer = workload.load_tokenizer(demo_folder)
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking is false %}!{% else %}?{% endif %}"
    assert tokenizer.decode(workload.templated(tokenizer, "text")) == "text!"


class StubTokenizer:
    chat_template = "{{ messages }}"

    def __init__(self, answer):
        self.answer = answer

    def apply_chat_template(self, messages, **_):
        return self.answer


@pytest.mark.parametrize("answer", [[5, 6], [[5, 6]], np.array([5, 6]), np.array([[5, 6]]), {"input_ids": [5, 6]}])
def test_ids_are_flat_whatever_form_the_tokenizer_returns(answer):
    assert workload.templated(StubTokenizer(answer), "text") == (5, 6)


@pytest.mark.parametrize("answer", ["a text", [], [[5], [6]], {"input_ids": ["a"]}])
def test_anything_but_one_row_of_ids_is_refused(answer):
    with pytest.raises(ValueError, match="row of ids"):
        workload.templated(StubTokenizer(answer), "text")


def test_a_tokenizer_without_template_is_refused(demo_folder):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(demo_folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="no chat template"):
        workload.templated(tokenizer, "text")


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=tmp_path.name):
        workload.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="nowhere"):
        workload.load_tokenizer(tmp_path / "nowhere")
