"""The tokenizer in a GGUF file, written in the Hugging Face layout: byte-level BPE with its splitter and chat template.

GGUF keeps vocabulary and merges, but only the name of what splits a text before them (`tokenizer.ggml.pre`). That
splitter is given back here: a tokenizer without it cuts numbers otherwise than its model has learned.
"""

import os
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lilicorr_jax.conversion.fields import Fields
from lilicorr_jax.conversion.folder import write_json
from lilicorr_jax.conversion.gguf import File

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types; 1 is an ordinary one
QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = {
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "qwen2": lambda: [
        pre_tokenizers.Split(Regex(QWEN2_PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
NORMALIZERS = {"qwen2": normalizers.NFC}


def write_tokenizer(file: File, folder: Path, *, context: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json; `context` is the most tokens of a text."""
    fields = Fields(file.metadata, f"{file.path}'s metadata")
    model, splitter = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre")
    if model != "gpt2" or splitter not in SPLITTERS:
        raise NotImplementedError(
            f"{file.path} has a tokenizer {model!r} split by {splitter!r}; 'gpt2' split by {', '.join(SPLITTERS)} is "
            "converted."
        )
    tokens = file.metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(file, tokens), merges=_merges(file)))
    if splitter in NORMALIZERS:
        tokenizer.normalizer = NORMALIZERS[splitter]()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITTERS[splitter]())
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, file.metadata["tokenizer.ggml.token_type"], strict=True)
    added = [(token, kind) for token, kind in kinds if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
    tokenizer.save(str(folder / "tokenizer.json.partial"), pretty=False)
    os.replace(folder / "tokenizer.json.partial", folder / "tokenizer.json")
    write_json(folder, "tokenizer_config.json", _config(fields, tokens, context))


def _vocabulary(file: File, tokens: tuple[str, ...]) -> dict[str, int]:
    """Ids of all tokens but rows that only pad the embedding."""
    kinds = file.metadata["tokenizer.ggml.token_type"]
    if len(kinds) != len(tokens) or len(set(tokens)) < len(tokens):
        raise ValueError(
            f"{file.path} has {len(tokens)} tokens, {len(set(tokens))} of them distinct, and {len(kinds)} types."
        )
    return {token: id for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}


def _merges(file: File) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    if odd := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"{file.path} has a merge that does not join two tokens: {odd[0]!r:.100}.")
    return merges  # type: ignore[return-value]


def _config(fields: Fields, tokens: tuple[str, ...], context: int) -> dict:
    special = {
        name: tokens[fields.integer(f"tokenizer.ggml.{key}", most=len(tokens) - 1)]
        for name, key in (("eos_token", "eos_token_id"), ("pad_token", "padding_token_id"))
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.text("tokenizer.chat_template"),
    }
