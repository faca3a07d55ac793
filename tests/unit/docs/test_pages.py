"""Pages name what exists: paths, benchmarks, packages, commands. The README stays one screen."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from skyctl.cli import app as app_module

ROOT = Path(__file__).parents[3]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = [
    *TOP,
    ROOT / "fleet.yaml.example",
    ROOT / "tests/failure-matrix.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PACKAGES = sorted(found.parent for found in (ROOT / "skyctl").rglob("__init__.py"))
README_WORDS = 900
GENERATED = "<!-- Written by scripts/generate-reference."
WORDS = {"written": 34_000, "generated": 11_000}
"""Of all pages, by their origin. Lower them when pages become shorter."""
VENDORS = {  # modules of other programs that docstrings name without a folder
    "cpu_communicator.py",
    "nccl_engine.py",
    "packed_tensor.py",
    "shm_broadcast.py",
    "tokenizer_manager.py",
    "unquantized_fused_moe_method.py",
}
# in backticks: a module, or a file or folder below a folder; `<name>` and `*` stand for any name
PATH = re.compile(r"`([\w<>*-]+\.py|[\w.<>*-]+(?:/[\w.<>*-]+)*(?:/|/[\w.<>*-]+\.[a-z]+))`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
BENCHMARK = re.compile(r"python -m (benchmarks\.\w+)")


def missing_paths(text: str, *beside: Path) -> list[str]:
    """Paths of the repository, of the package, or in folders `beside`, that nothing matches."""
    absent, bases = [], (ROOT, ROOT / "skyctl", *beside)
    for path in PATH.findall(text):
        top = path.partition("/")[0]
        if "/" in path and not any((base / top).is_dir() for base in bases):
            continue  # of another program: a checkpoint, a state directory
        pattern = re.sub(r"<\w+>", "*", path).rstrip("/")
        if not any(next(base.glob(pattern), None) for base in bases):
            absent.append(path)
    return absent


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing_paths(text) == []
    modules = [module.replace(".", "/") for module in BENCHMARK.findall(text)]
    assert [m for m in modules if not any((ROOT / m).parent.glob(f"{Path(m).name}*"))] == []


def test_what_a_docstring_names_exists() -> None:
    """Beside its module, too. Files of vLLM, SGLang and torch are named in vendors' folders."""
    absent = {
        f"{module.relative_to(ROOT)}:{node.lineno} {path}"
        for module in sorted((ROOT / "skyctl").rglob("*.py"))
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for path in missing_paths(str(node.value.value), module.parent, module.parents[1])
        if path not in VENDORS and not path.startswith("./")
    }
    assert absent == set()


@pytest.mark.parametrize("page", TOP, ids=lambda page: page.name)
def test_links_of_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_a_path_that_is_gone_is_found() -> None:
    text = "`skyctl/no/such.py`, `push/nothing.py`, `gone.py`, `docs/none.md`, `tests/nowhere/`"
    assert len(missing_paths(text)) == 5
    text = "`skyctl/output.py`, `output.py`, `cli/<verb>.py`, `tests/unit/`, `runs/step-1/`"
    assert missing_paths(text) == []


def test_the_pages_are_no_longer_than_they_were() -> None:
    counts = dict.fromkeys(WORDS, 0)
    for page in (*TOP[:3], *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        origin = "generated" if text.startswith(GENERATED) else "written"
        counts[origin] += len(text.split())
    assert all(counts[origin] <= WORDS[origin] for origin in WORDS), counts


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Commands")[2].partition("\n## ")[0]
    named = {word for cell in re.findall(r"^\| (.+?) \|", table, re.M) for word in cell.split("`")}
    named = {word.split()[0] for word in named if word.strip(" ,")}
    assert {verb.name for verb in app_module.VERBS} <= named


def test_the_design_lists_every_package() -> None:
    table = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Packages")[2]
    listed = set(re.findall(r"`(\w+)/", table.partition("\n**")[0]))
    assert {p.name for p in PACKAGES if p.parent == ROOT / "skyctl"} <= listed


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_package_says_what_it_is_for(package: Path) -> None:
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
