"""What is learned of a conversation, against texts written out by hand and against what serving would read."""

import numpy as np
import pytest

from lilicorr_jax.chat import prompt_ids
from lilicorr_jax.conversion.tokenizer import load_tokenizer
from serve import workload
from tests.train.templates import QWEN3_LIKE, write_tokenizer
from train import chat
from train.conversations import conversation_of

OFF, END = "<think>\n\n</think>\n\n", "<|im_end|>"
TWO_TURNS = [("user", "A?"), ("assistant", "one"), ("user", "B?"), ("assistant", "two")]
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds"}}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("qwen"), QWEN3_LIKE))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("chatml")))


def conversation(*turns, **row):
    messages = [turn if isinstance(turn, dict) else dict(zip(("role", "content"), turn, strict=True)) for turn in turns]
    return conversation_of({"id": "c", "messages": messages} | row, default_category="test")


def shown(tokenizer, rows) -> list[str]:
    return [chat.show(tokenizer, row, marks=("[[", "]]")) for row in rows]


def test_the_answer_and_its_end_of_turn_are_learned_and_nothing_else(qwen):
    rows = chat.render(qwen, conversation(("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho")), thinking=False)
    assert shown(qwen, rows) == [
        f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nHi{END}\n<|im_start|>assistant\n{OFF}[[Ho{END}]]"
    ]


def test_each_turn_has_a_row_of_its_own_where_the_template_rewrites_history(qwen):
    rows = chat.render(qwen, conversation(*TWO_TURNS), thinking=False)
    first = f"<|im_start|>user\nA?{END}\n<|im_start|>assistant\n"
    assert shown(qwen, rows) == [
        f"{first}{OFF}[[one{END}]]",
        f"{first}one{END}\n<|im_start|>user\nB?{END}\n<|im_start|>assistant\n{OFF}[[two{END}]]",
    ]


def test_turns_share_a_row_where_the_template_keeps_history_as_it_was(chatml):
    rows = chat.render(chatml, conversation(*TWO_TURNS), thinking=False)
    assert shown(chatml, rows) == [
        f"<|im_start|>user\nA?{END}\n<|im_start|>assistant\n[[one{END}]]\n"
        f"<|im_start|>user\nB?{END}\n<|im_start|>assistant\n[[two{END}]]"
    ]


@pytest.mark.parametrize("thinking", [False, True])
def test_every_row_begins_with_the_very_ids_that_serving_reads(qwen, thinking):
    thought = {"reasoning_content": "hm"} if thinking else {}
    messages = [{"role": role, "content": text} | (thought if role == "assistant" else {}) for role, text in TWO_TURNS]
    rows = chat.render(qwen, conversation(*messages), thinking=thinking)
    for row, history in zip(rows, (messages[:1], messages[:3]), strict=True):
        served = qwen.apply_chat_template(
            history, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
        )
        assert row.token_ids[: len(served)].tolist() == served
        assert not row.loss_mask[: len(served)].any() and row.loss_mask[len(served) :].all()


def test_a_single_question_is_rendered_as_the_bench_asks_it(qwen):
    (row,) = chat.render(qwen, conversation(("user", "A?"), ("assistant", "one")), thinking=False)
    asked = workload.templated(qwen, "A?")
    assert tuple(row.token_ids[: np.argmax(row.loss_mask)].tolist()) == asked


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "<think>a b</think>c"},
        {"role": "assistant", "content": "c", "reasoning_content": "a b"},
        {"role": "assistant", "content": "c", "reasoning": "a b"},
    ],
)
def test_with_thinking_on_the_thought_its_tags_and_the_answer_are_all_learned(qwen, answer):
    (row,) = chat.render(qwen, conversation(("user", "A?"), answer), thinking=True)
    assert len(row.loss_mask) == len(row.token_ids)
    assert qwen.decode(row.token_ids[row.loss_mask]) == f"<think>\na b\n</think>\n\nc{END}"
    assert qwen.decode(row.token_ids[~row.loss_mask]) == f"<|im_start|>user\nA?{END}\n<|im_start|>assistant\n"


@pytest.mark.parametrize("content, thinking, said", [("<think>a</think>c", False, "off"), ("c", True, "on")])
def test_a_turn_that_the_target_would_not_write_in_this_mode_is_refused(qwen, content, thinking, said):
    with pytest.raises(ValueError, match=f"message 1 holds .*reasoning, but thinking is {said}"):
        chat.render(qwen, conversation(("user", "A?"), ("assistant", content)), thinking=thinking)


def test_a_template_without_thinking_takes_think_tags_as_text(chatml):
    talk = conversation(("user", "A?"), ("assistant", "<think>a</think>c"))
    (row,) = chat.render(chatml, talk, thinking=False)
    assert chatml.decode(row.token_ids[row.loss_mask]) == f"<think>a</think>c{END}"


def test_calls_are_learned_tools_and_their_results_are_read(qwen):
    call = {"role": "assistant", "content": None, "tool_calls": [ADD]}
    talk = conversation(("user", "2+3?"), call, ("tool", "5"), ("assistant", "five"), tools=[TOOL])
    rows = chat.render(qwen, talk, thinking=False)
    trained = [qwen.decode(row.token_ids[row.loss_mask]) for row in rows]
    assert trained[0] == f'<tool_call>\n{{"name": "add", "arguments": {{"a": 2, "b": 3}}}}\n</tool_call>{END}'
    assert trained[1] == f"five{END}"
    read = qwen.decode(rows[1].token_ids[~rows[1].loss_mask])
    assert "<tool_response>\n5\n</tool_response>" in read and '"description": "adds"' in read


def test_an_answer_that_was_cut_off_is_learned_without_an_end(qwen):
    cut = {"role": "assistant", "content": "It is", "finish_reason": "length"}
    (row,) = chat.render(qwen, conversation(("user", "A?"), cut), thinking=False)
    assert qwen.decode(row.token_ids[row.loss_mask]) == "It is"


def test_the_tokens_that_the_target_wrote_are_learned_as_they_are(chatml):
    """Letter by letter: encoding the same text would join them."""
    letters = [chatml.encode(letter)[0] for letter in "five"]
    assert letters != chatml.encode("five")
    own = {"role": "assistant", "content": "five", "token_ids": [*letters, chatml.eos_token_id]}
    (row,) = chat.render(chatml, conversation(("user", "A?"), own), thinking=False)
    assert row.token_ids[row.loss_mask].tolist() == own["token_ids"]


@pytest.mark.parametrize("ids", [[300, 301], ["a"], []])
def test_tokens_that_do_not_spell_the_answer_are_refused(chatml, ids):
    own = {"role": "assistant", "content": "five", "token_ids": ids}
    with pytest.raises(ValueError, match="message 1: its token_ids"):
        chat.render(chatml, conversation(("user", "A?"), own), thinking=False)


def test_an_end_of_turn_inside_an_answer_is_refused(chatml):
    with pytest.raises(ValueError, match="message 1 holds the end-of-turn token"):
        chat.render(chatml, conversation(("user", "A?"), ("assistant", f"one{END}two")), thinking=False)


def test_a_template_that_never_ends_a_turn_is_refused_by_stop_id(chatml):
    with pytest.raises(ValueError, match=r"none of the stop ids \[0\]"):
        chat.render(chatml, conversation(("user", "A?"), ("assistant", "one")), thinking=False, stop_ids=[0])


def test_a_template_that_writes_an_answer_unlike_its_prompt_is_refused(chatml, monkeypatch):
    template = "{{ messages | length }}{% if add_generation_prompt %}:{% endif %}"
    monkeypatch.setattr(chatml, "chat_template", template)
    with pytest.raises(ValueError, match="message 1: the template writes it otherwise"):
        chat.render(chatml, conversation(("user", "A?"), ("assistant", "one")), thinking=False)


def test_what_a_template_refuses_is_said_in_its_words(chatml, monkeypatch):
    monkeypatch.setattr(chatml, "chat_template", "{{ raise_exception('No systems here') }}")
    with pytest.raises(ValueError, match="No systems here"):
        chat.render(chatml, conversation(("user", "A?"), ("assistant", "one")), thinking=False)


def test_a_conversation_without_answers_teaches_nothing(chatml):
    with pytest.raises(ValueError, match="no assistant turn"):
        chat.render(chatml, conversation(("user", "A?")), thinking=False)


def gives(encoded):
    """A tokenizer whose template gives this."""

    class Stub:
        chat_template = "{{ messages }}"

        def apply_chat_template(self, messages, **_):
            return encoded

    return Stub()


@pytest.mark.parametrize("encoded", [[5, 6], [[5, 6]], np.array([5, 6]), np.array([[5, 6]]), {"input_ids": [5, 6]}])
def test_ids_are_one_flat_row_whatever_a_tokenizer_returns(encoded):
    assert prompt_ids(gives(encoded), [{"role": "user", "content": "text"}]) == (5, 6)


@pytest.mark.parametrize("encoded", [[], [[5], [6]], ["5", "6"], "56", [5.0], {"ids": [5, 6]}, {"input_ids": []}])
def test_what_is_no_row_of_ids_is_refused(encoded):
    with pytest.raises(ValueError, match="a row of ids is needed"):
        prompt_ids(gives(encoded), [{"role": "user", "content": "text"}])
