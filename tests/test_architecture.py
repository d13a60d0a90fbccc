"""The arrows between packages and the sizes of their files, read from the source; the README, read against the tree."""

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "lilicorr_jax", "train", "serve", "demo", "benchmarks")
SOURCES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))

# What may not be imported, by the folder or file that may not import it. A name stands for all that lies below it.
FORBIDDEN = {
    "pallas_kernels": ("lilicorr_jax", "train", "serve", "demo", "benchmarks"),
    "lilicorr_jax": (
        "train",
        "serve",
        "demo",
        "benchmarks",
        "absl",
        "lilicorr_jax.flags",
        "time",
        "datetime",
        "logging",
        "random",
    ),
    "lilicorr_jax/losses": ("lilicorr_jax.models", "lilicorr_jax.decoding", "lilicorr_jax.cache"),
    "lilicorr_jax/models": ("lilicorr_jax.losses", "lilicorr_jax.decoding", "lilicorr_jax.conversion"),
    "lilicorr_jax/decoding": ("lilicorr_jax.losses", "lilicorr_jax.conversion"),
    "lilicorr_jax/config.py": ("lilicorr_jax", "jax", "flax"),
    "lilicorr_jax/presets.py": ("jax", "flax"),
    "train": ("serve", "demo", "benchmarks"),
    "serve": ("train", "demo", "benchmarks", "optax"),
    "demo": ("benchmarks",),
    ".": ("torch", "grain"),
}
ALLOWED = {
    "lilicorr_jax/flags.py": ("absl",),
    "lilicorr_jax/models/lilicorr.py": ("lilicorr_jax.decoding.candidates",),  # the five scalars, arrays in, arrays out
    "lilicorr_jax/config.py": ("lilicorr_jax.shapes",),
    "train/data.py": ("grain",),
    "benchmarks/peers": ("torch",),
}
KERNEL_IMPORTS = {"jax", "jaxlib", "numpy", "jaxtyping", "pallas_kernels"} | sys.stdlib_module_names
FILE_LIBRARIES = ("pathlib", "os", "io", "safetensors", "orbax", "json", "csv", "shutil", "tempfile")
FILE_CALLS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "iterdir", "glob", "rglob", "mkdir", "unlink"),
    *("memmap", "fromfile", "tofile", "savez", "savez_compressed", "loadtxt", "savetxt"),
}
OPENS_FILES = ("lilicorr_jax/conversion", "lilicorr_jax/flags.py")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 100


def imported_modules(source: str, path: Path) -> set[str]:
    """Every module that a file may import, at whatever depth it does: `from a import b` gives `a` and `a.b`."""
    modules = set()
    package = path.parent.parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            modules |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return modules


def is_below(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def wrong_imports(source: str, path: Path) -> set[str]:
    """The imports of a file that its place in the tree forbids."""
    places = [path.as_posix(), *(parent.as_posix() for parent in path.parents)]
    forbidden = {name for place in places for name in FORBIDDEN.get(place, ())}
    allowed = {name for place in places for name in ALLOWED.get(place, ())}
    allowed.add(".".join(path.with_suffix("").parts))
    return {
        module
        for module in imported_modules(source, path)
        if any(is_below(module, name) for name in forbidden) and not any(is_below(module, name) for name in allowed)
    }


def file_accesses(source: str, path: Path) -> set[str]:
    """What in a file's source reads or writes the disk: libraries for files that it imports, calls that open them."""
    libraries = {m for m in imported_modules(source, path) if any(is_below(m, library) for library in FILE_LIBRARIES)}
    names = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    }
    return libraries | (names & FILE_CALLS)


def long_functions(source: str) -> list[str]:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > MAX_FUNCTION_LINES]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_follow_the_arrows(path):
    assert wrong_imports((ROOT / path).read_text(), path) == set()


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] == "pallas_kernels"], ids=str)
def test_kernels_import_nothing_but_jax_numpy_and_the_standard_library(path):
    modules = imported_modules((ROOT / path).read_text(), path)
    assert {module.partition(".")[0] for module in modules} <= KERNEL_IMPORTS


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parts[0] == "lilicorr_jax"], ids=str)
def test_only_conversion_opens_files(path):
    if not path.as_posix().startswith(OPENS_FILES):
        assert file_accesses((ROOT / path).read_text(), path) == set()


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=str)
def test_files_and_functions_are_short_enough_to_read(path):
    source = (ROOT / path).read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert long_functions(source) == []


def test_no_file_is_named_for_having_no_home():
    homeless = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [path for path in SOURCES + TESTS if homeless & {part.removesuffix(".py") for part in path.parts}] == []


@pytest.mark.parametrize(
    "path, source, wrong",
    [
        ("lilicorr_jax/losses/rerank.py", "from lilicorr_jax.models import layers", "lilicorr_jax.models"),
        ("lilicorr_jax/losses/rerank.py", "from ..decoding.walk import walk", "lilicorr_jax.decoding.walk"),
        ("lilicorr_jax/cache.py", "from lilicorr_jax import flags", "lilicorr_jax.flags"),
        ("lilicorr_jax/models/target.py", "def f():\n    import time", "time"),
        ("train/step.py", "import serve.engine", "serve.engine"),
        ("train/step.py", "import grain.python as pygrain", "grain.python"),
        ("serve/engine.py", "if True:\n    from train import config", "train.config"),
        ("pallas_kernels/bench.py", "import lilicorr_jax.config", "lilicorr_jax.config"),
    ],
)
def test_a_wrong_arrow_is_seen_wherever_it_hides(path, source, wrong):
    assert wrong in wrong_imports(source, Path(path))


@pytest.mark.parametrize(
    "path, source",
    [
        ("train/data.py", "import grain"),
        ("lilicorr_jax/flags.py", "from absl import flags"),
        ("lilicorr_jax/decoding/speculate.py", "from lilicorr_jax.models import target\nimport timeit_of_ours"),
    ],
)
def test_a_right_arrow_passes(path, source):
    assert wrong_imports(source, Path(path)) == set()


@pytest.mark.parametrize(
    "source", ["open('x')", "path.read_text()", "import safetensors.flax", "np.memmap('x')", "from pathlib import Path"]
)
def test_opening_a_file_is_seen(source):
    assert file_accesses(source, Path("lilicorr_jax/cache.py"))


def fenced_blocks(text: str) -> list[list[str]]:
    return [block.strip("\n").splitlines() for block in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)]


def tree_entries(lines: list[str]) -> Iterator[Path]:
    """The paths that an annotated tree names: indentation nests, a folder ends in a slash, two blanks end the name."""
    folders: list[tuple[int, Path]] = []
    for line in filter(str.strip, lines):
        indent = len(line) - len(line.lstrip())
        name = re.split(r"\s{2,}", line.strip())[0]
        folders = [folder for folder in folders if folder[0] < indent]
        path = (folders[-1][1] if folders else Path()) / name
        if name.endswith("/"):
            folders.append((indent, path))
        yield path


def test_every_entry_of_the_readme_tree_exists():
    trees = [block for block in fenced_blocks((ROOT / "README.md").read_text()) if re.match(r"[\w.]+/(\s|$)", block[0])]
    entries = [path for tree in trees for path in tree_entries(tree)]
    assert set(map(Path, PACKAGES)) <= set(entries)
    assert [str(path) for path in entries if not (ROOT / path).exists()] == []


def table(text: str, header: str) -> list[list[str]]:
    """The cells of the table that begins with this line, row by row."""
    lines = itertools.takewhile(lambda line: line.startswith("|"), text[text.index(header) :].splitlines()[2:])
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def files_named(cell: str) -> list[Path]:
    """The paths in backquotes; `a/{b,c}.py` are two."""
    found = []
    for name in re.findall(r"`([\w./{},]+/[\w./{},]*)`", cell):
        before, choices, behind = re.fullmatch(r"([^{]*)(?:{(.*)})?(.*)", name).groups()
        found += [Path(before + choice + behind) for choice in (choices or "").split(",")]
    return found


def test_every_row_of_the_readmes_table_names_a_file_and_a_test_that_exist():
    rows = table((ROOT / "README.md").read_text(), "| paper | file | test |\n")
    assert len(rows) > 20
    for paper, file, test in rows:
        assert paper and files_named(file) and files_named(test), paper
        assert all((ROOT / path).exists() for path in files_named(file) + files_named(test)), paper
        assert all(path.parts[0] == "tests" for path in files_named(test)), paper


def test_a_table_is_read_cell_by_cell_and_its_files_one_by_one():
    text = "a\n| x | y |\n|---|---|\n| Eq. 1 | `a/{b,c}.py`, `d/` and `words` |\n| | z |\n\n| other |\n"
    assert table(text, "| x | y |\n") == [["Eq. 1", "`a/{b,c}.py`, `d/` and `words`"], ["", "z"]]
    assert files_named("`a/{b,c}.py`, `d/` and `words`") == [Path("a/b.py"), Path("a/c.py"), Path("d")]


def test_every_command_of_the_readme_exists():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(sum(fenced_blocks(readme), [])))) <= targets
    modules = [Path(*module.split(".")) for module in re.findall(r"python -m ([\w.]+)", readme) if module != "pip"]
    assert [
        m for m in modules if not ((ROOT / m).with_suffix(".py").exists() or (ROOT / m / "__main__.py").exists())
    ] == []
    assert [file for file in re.findall(r"--flagfile=(\S+\.flags)", readme) if not (ROOT / file).exists()] == []


def test_a_tree_is_read_by_its_indentation():
    tree = ["train/", "  main.py  flags to record", "  sub/     a folder", "    deep.py", "  step.py", "README.md"]
    names = ["train", "train/main.py", "train/sub", "train/sub/deep.py", "train/step.py", "README.md"]
    assert [path.as_posix() for path in tree_entries(tree)] == names
