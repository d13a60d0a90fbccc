"""Hugging Face folders of targets and drafters, read into parameter trees and written from them.

Reading goes tensor by tensor straight to where a parameter belongs, so the host holds one at a time. A folder loads
whole or not at all: configuration, names, shapes and bytes are checked first, and every problem with the tensors comes
in one report. Parameters get the configuration's dtype, in both directions.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from lilicorr_jax.config import CorrectorConfig, DrafterConfig, DSparkConfig, Dtype, TargetConfig, corrector_name
from lilicorr_jax.conversion.config_json import (
    CONFIG_FILE,
    GENERATION_FILE,
    drafter_from_json,
    drafter_to_json,
    generation_to_json,
    target_from_json,
    target_to_json,
)
from lilicorr_jax.conversion.folder import exists, read_json, write_json
from lilicorr_jax.conversion.rules import (
    Rule,
    check_cover,
    corrector_rules,
    decoded,
    drafter_rules,
    flat,
    stored_shapes,
    target_rules,
    under,
)
from lilicorr_jax.conversion.safetensors import SINGLE_FILE, Entry, read_folder, write_file
from lilicorr_jax.models.corrector import corrector_shapes, make_corrector
from lilicorr_jax.models.dflash import Drafter, drafter_shapes
from lilicorr_jax.models.linear import for_decoding
from lilicorr_jax.models.target import Target
from lilicorr_jax.sharding import abstract_parameters

TILE = 256


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """A trained drafter: `params` holds the tree `drafter` and that of the corrector, if any, under its name."""

    drafter: DrafterConfig
    corrector: CorrectorConfig | None
    params: dict


def load_target(
    folder: Path | str, *, dtype: Dtype | None = None, mesh: Mesh | None = None, to_decode: bool = False
) -> tuple[TargetConfig, dict]:
    """A target's configuration and parameters.

    Args:
        folder: config.json, generation_config.json where there is one, and safetensors.
        dtype: of activations and parameters; None takes the one that config.json names.
        mesh: parameters are placed by `sharding.LOGICAL_RULES`; None puts them on the default device.
        to_decode: gives the tree of `models.linear.for_decoding`, on the default device.

    Raises:
        ValueError: the folder is not a target's, or both `mesh` and `to_decode` are asked for.
    """
    if to_decode and mesh is not None:
        raise ValueError("A target that is read to decode lies on the default device; ask for to_decode or a mesh.")
    folder = Path(folder)
    generation = read_json(folder, GENERATION_FILE) if exists(folder, GENERATION_FILE) else None
    config = target_from_json(read_json(folder, CONFIG_FILE), generation, dtype=dtype)
    entries = {name: entry for name, entry in read_folder(folder).items() if not _is_rotary_buffer(name)}
    if config.tie_embeddings:
        entries = _without_tied_copy(folder, entries)
    rules, abstract = target_rules(config), abstract_target(config, mesh)
    _check(folder, entries, rules, abstract)
    if to_decode:
        rules, abstract = decoded(rules), jax.eval_shape(for_decoding, abstract)
    return config, _read(entries, rules, abstract, config.dtype)


def save_target(folder: Path | str, config: TargetConfig, params: Mapping) -> None:
    """Writes a target as transformers does, in one file of the configuration's dtype."""
    folder = Path(folder)
    write_json(_made(folder), CONFIG_FILE, target_to_json(config))
    write_json(folder, GENERATION_FILE, generation_to_json(config))
    _write(folder, target_rules(config), abstract_target(config), params, config.dtype)


def load_drafter(folder: Path | str, *, dtype: Dtype | None = None, mesh: Mesh | None = None) -> DrafterCheckpoint:
    """A drafter of any method; arguments as for `load_target`. Names may carry a leading `model.`."""
    folder = Path(folder)
    drafter, corrector = drafter_from_json(read_json(folder, CONFIG_FILE), dtype=dtype)
    entries = _without_prefix(folder, read_folder(folder))
    if isinstance(corrector, DSparkConfig):
        entries = _without_borrowed(folder, entries, drafter)
    rules, abstract = checkpoint_rules(drafter, corrector), abstract_drafter(drafter, corrector, mesh)
    _check(folder, entries, rules, abstract)
    params = _read(entries, rules, abstract, drafter.dtype)
    return DrafterCheckpoint(drafter=drafter, corrector=corrector, params=params)


def save_drafter(folder: Path | str, checkpoint: DrafterCheckpoint) -> None:
    """Writes a drafter in its public layout; embedding and unembedding stay the target's."""
    folder, drafter, corrector = Path(folder), checkpoint.drafter, checkpoint.corrector
    write_json(_made(folder), CONFIG_FILE, drafter_to_json(drafter, corrector))
    rules, abstract = checkpoint_rules(drafter, corrector), abstract_drafter(drafter, corrector)
    _write(folder, rules, abstract, checkpoint.params, drafter.dtype)


def checkpoint_rules(drafter: DrafterConfig, corrector: CorrectorConfig | None) -> tuple[Rule, ...]:
    """The table of a whole drafter folder."""
    rules = under("drafter", drafter_rules(drafter))
    return rules if corrector is None else (*rules, *under(corrector_name(corrector), corrector_rules(corrector)))


def abstract_target(config: TargetConfig, mesh: Mesh | None = None) -> dict:
    """Shapes (and shardings) of a target's parameters."""
    return abstract_parameters(Target(config), jax.ShapeDtypeStruct((1, 1), jnp.int32), mesh=mesh)


def abstract_drafter(drafter: DrafterConfig, corrector: CorrectorConfig | None, mesh: Mesh | None = None) -> dict:
    """Shapes (and shardings) of the parameters of a `DrafterCheckpoint`."""
    shapes = {
        "drafter": abstract_parameters(Drafter(drafter), *drafter_shapes(drafter), mesh=mesh, method="from_features")
    }
    if corrector is not None:
        module, arguments = make_corrector(corrector), corrector_shapes(corrector)
        shapes[corrector_name(corrector)] = abstract_parameters(module, *arguments, mesh=mesh)
    return shapes


def _check(folder: Path, entries: Mapping[str, Entry], rules: tuple[Rule, ...], abstract: Mapping) -> None:
    check_cover(str(folder), stored_shapes(rules, abstract), {name: entry.shape for name, entry in entries.items()})


def _read(entries: Mapping[str, Entry], rules: tuple[Rule, ...], abstract: Mapping, dtype: Dtype) -> dict:
    """Leaf by leaf; the tensors of one path lie one below the other."""
    sources: dict[str, list[Rule]] = {}
    for rule in rules:
        sources.setdefault(rule.path, []).append(rule)

    def view(parts: list[Rule]) -> np.ndarray:
        views = [part.layout.read(entries[part.name].open()) for part in parts]
        return views[0] if len(views) == 1 else np.concatenate(views)

    leaves = flat(abstract)
    placed = {path: _place(view(parts), leaves[path], dtype) for path, parts in sources.items()}
    return unflatten_dict(placed, sep="/")


def _place(view: np.ndarray, leaf: jax.ShapeDtypeStruct, dtype: Dtype) -> jax.Array:
    """Copies a view of a file to where the leaf belongs, and waits, so that host copies don't pile up."""

    @functools.cache  # devices that hold the same piece share the copy
    def piece(index):
        return _copied(view[index], jnp.dtype(dtype))

    if leaf.sharding is None:
        array = jax.device_put(piece(...), may_alias=False)
    else:
        array = jax.make_array_from_callback(leaf.shape, leaf.sharding, piece)
    return jax.block_until_ready(array)


def _copied(view: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A contiguous copy. Transposed matrices go tile by tile, since copied by rows they miss the cache all the time."""
    bits = np.dtype(f"u{dtype.itemsize}")
    if view.dtype == dtype != bits:  # NumPy moves whole numbers fastest, and bfloat16 slowly
        return _copied(view.view(bits), bits).view(dtype)
    copy = np.empty(view.shape, dtype)
    if view.flags.c_contiguous or view.ndim != 2:
        copy[...] = view
        return copy
    for row in range(0, view.shape[0], TILE):
        for column in range(0, view.shape[1], TILE):
            tile = np.s_[row : row + TILE, column : column + TILE]
            copy[tile] = view[tile]
    return copy


def _write(folder: Path, rules: tuple[Rule, ...], abstract: Mapping, params: Mapping, dtype: Dtype) -> None:
    wanted, found = flat(abstract), flat(params)
    check_cover(
        f"the parameters for {folder}",
        {path: leaf.shape for path, leaf in wanted.items()},
        {path: leaf.shape for path, leaf in found.items()},
    )

    def stored(rule: Rule) -> np.ndarray:
        return _copied(rule.layout.write(np.asarray(jax.device_get(found[rule.path]))), jnp.dtype(dtype))

    write_file(folder / SINGLE_FILE, {rule.name: stored(rule) for rule in rules})


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_rotary_buffer(name: str) -> bool:
    """Old exporters stored the rotary frequencies, which follow from the configuration."""
    return name.endswith(".rotary_emb.inv_freq")


def _without_prefix(folder: Path, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """`model.` in front of all names, and `logit_head.`, under which early Domino files keep the correction."""
    names = {name: name.removeprefix("model.").removeprefix("logit_head.") for name in entries}
    if twice := sorted(name for name in names if names[name] != name and names[name] in names):
        raise ValueError(f"{folder} has tensors both with and without a prefix: {twice[:8]}.")
    return {names[name]: entry for name, entry in entries.items() if not _is_rotary_buffer(name)}


def _without_borrowed(folder: Path, entries: dict[str, Entry], drafter: DrafterConfig) -> dict[str, Entry]:
    """DeepSpec stores frozen copies of the target's embedding and unembedding; the target's own are used instead."""
    borrowed = ("embed_tokens.weight", "lm_head.weight")
    found = {name: entries[name].shape for name in borrowed if name in entries}
    check_cover(f"the target in {folder}", dict.fromkeys(found, (drafter.vocab_size, drafter.width)), found)
    return {name: entry for name, entry in entries.items() if name not in borrowed}


def _without_tied_copy(folder: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    """Some tied checkpoints store their unembedding once more; it must be the embedding, bit for bit."""
    embedding, copy = entries.get("model.embed_tokens.weight"), entries.pop("lm_head.weight", None)
    if embedding is None or copy is None:
        return entries
    if (copy.shape, copy.dtype) != (embedding.shape, embedding.dtype) or not _same_bytes(copy, embedding):
        raise ValueError(
            f"{folder}'s config.json ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
            f"set tie_word_embeddings to false to use it."
        )
    return entries


def _same_bytes(one: Entry, other: Entry) -> bool:
    left, right = one.open(), other.open()
    return all(left[row].tobytes() == right[row].tobytes() for row in range(one.shape[0]))
