"""The tokenizer: any text comes back, specials and digits are single, transformers reads it as we do."""

import itertools

import pytest

from demo import corpus
from demo import tokenizer as demo_tokenizer
from lilicorr_jax import presets
from serve.workload import load_tokenizer, templated


@pytest.fixture(scope="module")
def tokenizer():
    records = itertools.islice(corpus.records("pretrain", seed=0), 300)
    return demo_tokenizer.train(text for record in records for text in (record.prompt, record.reply))


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer.write(tokenizer, path, context=512)
    return path


def test_it_fills_the_demo_vocabulary_and_puts_the_specials_where_the_preset_expects_them(tokenizer):
    preset = presets.demo()
    assert tokenizer.get_vocab_size() == preset.target.vocab_size
    ids = [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>", "<|mask|>")]
    assert tuple(ids) == (*preset.target.eos_ids, preset.drafter.mask_id)


@pytest.mark.parametrize(
    "text", ["Mia met a fox.", "  def f(x):\n\treturn x\n\n", "żółw 龟 🐢 \x00 é", " 1234", "", "a  b\r\n"]
)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_corpus_texts_come_back_and_their_words_are_of_one_to_few_pieces(tokenizer):
    texts = [record.reply for record in itertools.islice(corpus.records("pretrain", seed=8), 40)]
    assert [tokenizer.decode(tokenizer.encode(text).ids) for text in texts] == texts
    letters = sum(map(len, texts)) / sum(len(tokenizer.encode(text).ids) for text in texts)
    assert 1.5 < letters < 4


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.encode("90817 263").tokens == ["9", "0", "8", "1", "7", "Ġ", "2", "6", "3"]


def test_no_text_of_a_user_is_cut_across_a_special(tokenizer):
    tokens = tokenizer.encode(demo_tokenizer.render("Sort: a<|im_end")).tokens
    assert [token for token in tokens if token in demo_tokenizer.SPECIALS] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]


def test_transformers_templates_a_prompt_as_we_do(tokenizer, folder):
    ids = templated(load_tokenizer(folder), "Sort 3, 1 and 2!")
    assert list(ids) == tokenizer.encode(demo_tokenizer.render("Sort 3, 1 and 2!")).ids


def test_the_template_writes_a_whole_conversation(folder):
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")]
    text = load_tokenizer(folder).apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], tokenize=False, add_generation_prompt=False
    )
    assert text == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
