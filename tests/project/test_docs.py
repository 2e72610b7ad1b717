"""The code in README.md and docs/ runs as printed, in order; public names have docstrings."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import re
import tomllib
import types
from pathlib import Path

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from pool import on_ranks
from shardtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch import nn
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language="python"):
    """(line, code) of each block."""
    text = (ROOT / page).read_text()
    return [(text.count("\n", 0, m.start(2)), m[2]) for m in BLOCK.finditer(text) if m[1] == language]


def run(page, number, names):
    line, code = blocks(page)[number]
    exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)  # errors name the line of the page


# ---- what a page takes as given, by block; on two ranks ----


class _Attention(nn.Module):
    def __init__(self, heads, kv_heads, head_dim):
        super().__init__()
        self.head_dim, self.group = head_dim, heads // kv_heads
        self.wq, self.wo = nn.Linear(8, heads * head_dim), nn.Linear(heads * head_dim, 8)
        self.wk, self.wv = (nn.Linear(8, kv_heads * head_dim) for _ in "kv")

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (t.repeat_interleave(self.group, 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class _Layer(_Attention):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x):
        x = x + super().forward(x)
        return x + self.down(torch.relu(self.up(x)))


class _Model(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(2000, 8)
        self.layers = nn.Sequential(_Layer(*sizes), _Layer(*sizes))

    def forward(self, tokens, targets, positions):
        y = self.layers(self.words(tokens) + self.places(positions))
        return nn.functional.cross_entropy(y.flatten(0, 1), targets.flatten().remainder(8))


def readme(number, names):
    if number == 2:
        names |= dict(heads=6, kv_heads=3, head_dim=4)
        names["model"] = _Model(names["heads"], names["kv_heads"], names["head_dim"])
    if number == 3:
        check_plan(names)
        size = 700 + 45 + 301
        names |= dict(tokens=torch.randint(11, (1, size)), targets=torch.randint(8, (1, size)), positions=torch.arange(size))
        names["model"] = _Model(2, 2, 4)
    if number == 4:
        assert names["loss"].isfinite()
        names["loader"] = [(torch.randn(n, 8), torch.randint(8, (n,))) for n in ((3, 1), (4,))[dist.get_rank()]]
        names["model"] = names["st"].distribute_module(nn.Linear(8, 8), names["mesh"])
    if number == 5:
        assert names["inputs"].shape == (1, 8) and names["loss"].full_tensor().isfinite()


def check_plan(names):
    """The plan gives what the model gives in one process."""
    torch.manual_seed(0)
    plain = _Model(names["heads"], names["kv_heads"], names["head_dim"])
    ours = names["parallelize_module"](copy.deepcopy(plain), names["mesh"], names["plan"])
    words = torch.randint(11, (2, 5)), torch.randint(8, (2, 5)), torch.arange(5)
    torch.testing.assert_close(ours(*words), plain(*words))


def compiling(number, names):
    if number == 0:
        names |= dict(torch=torch, shardtensor=st, Shard=st.Shard, ShardTensor=st.ShardTensor, fully_shard=fully_shard)
        names["mesh"] = st.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        along = names["mesh"]["tensor"]
        names["x"] = st.distribute_tensor(torch.randn(7, 8), along, [st.Shard(0)])
        names["w"] = st.distribute_tensor(torch.randn(8, 3), along, [st.Replicate()])
        names["plan"] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        names |= dict(parallelize_module=parallelize_module, model=nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8)))
        torch.compile = functools.partial(torch.compile, backend="aot_eager")  # inductor compiles for minutes
    if number == 1:
        names["model"](torch.randn(3, 8)).sum().backward()
        two = (nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8)) for _ in "ab")
        names["blocks"] = [parallelize_module(block, names["mesh"]["tensor"], names["plan"]) for block in two]
    if number == 2:
        x = torch.randn(3, 8)
        for block in names["blocks"]:
            x = block(x)
        x.sum().backward()
        names |= dict(mesh=names["mesh"]["tensor"], piece=torch.randn((5, 2)[dist.get_rank()], 8))
    if number == 4:
        names["other_mesh"] = st.DeviceMesh("cpu", torch.tensor([1, 0]))
        names["compiled"] = torch.compile(lambda t: t * 2, fullgraph=True)
    if number == 5:
        names["labels"] = st.distribute_tensor(torch.arange(5), names["mesh"], [st.Shard(0)])


def debugging(number, names):
    mesh = st.init_device_mesh("cpu", (2,))
    names["model"] = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    names["x"] = st.distribute_tensor(torch.randn(5, 4), mesh, [st.Shard(0)])
    st.distribute_module(names["model"], mesh)


def data(number, names):
    if number == 3:
        whole = [p.grad.full_tensor() for p in names["model"].parameters()]
        assert all(g.isfinite().all() for g in whole)
        os.chdir("..")  # files that all ranks see


def training(number, names):
    if number == 2:  # the optimizer has stepped on whole copies
        for p, w in zip(names["cut"], names["whole"], strict=True):
            torch.testing.assert_close(p.full_tensor(), w, rtol=0, atol=0)


def nothing(number, names):
    pass


PAGES = {
    "README.md": readme,
    "docs/compile.md": compiling,
    "docs/data.md": data,
    "docs/debugging.md": debugging,
    "docs/from-dtensor.md": nothing,
    "docs/from-physicsnemo.md": nothing,
    "docs/points.md": nothing,
    "docs/profiling.md": nothing,
    "docs/spatial.md": nothing,
    "docs/training.md": training,
}
# What these need is in the tests of their subject.
ELSEWHERE = {"docs/checkpoints.md", "docs/local_shards.md", "docs/sharded_tensor.md"}


@pytest.mark.parametrize("page", PAGES)
@on_ranks(2, seconds=100)
def test_code_runs_as_printed(page, tmp_path):
    before, stock, mode = Path.cwd(), torch.compile, st.get_promotion_mode()
    (tmp_path / str(dist.get_rank())).mkdir()
    os.chdir(tmp_path / str(dist.get_rank()))  # debugging.md writes a file
    try:
        names, count = {}, len(blocks(page))
        for number in range(count):
            PAGES[page](number, names)
            run(page, number, names)
        PAGES[page](count, names)
    finally:
        torch.compile = stock
        st.set_promotion_mode(mode)  # importing domain_parallel changes it
        os.chdir(before)


def test_every_page_with_code_is_run():
    pages = [p.relative_to(ROOT) for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    assert {str(p) for p in pages if blocks(p)} == set(PAGES) | ELSEWHERE


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/rules.md"])
def test_quoted_sources_are_in_csrc(page):
    def words(text):
        return re.sub(r"\s+", " ", text).strip()

    sources = words("\n".join(f.read_text() for f in (ROOT / "csrc").rglob("*.cpp")))
    text = re.sub(r"^   ", "", (ROOT / page).read_text(), flags=re.MULTILINE)
    quotes = [part for m in BLOCK.finditer(text) if m[1] == "cpp" for part in m[2].split("\n\n") if "// in the table of" not in part]
    assert quotes and [q for q in quotes if words(q) not in sources] == []
    tests = words("\n".join(f.read_text() for f in (ROOT / "tests/rules").glob("test_*.py")))
    cases = [m[2] for m in BLOCK.finditer(text) if m[1] == "python" and words(m[2]).startswith("case(")]
    assert bool(cases) == (page == "CONTRIBUTING.md") and [c for c in cases if words(c) not in tests] == []


# ---- what the pages say ----


def test_errors_by_their_text_are_in_the_source():
    """The first column of each table quotes a part of a message."""
    join = re.compile(r'"\s*(?:,\s*)?f?"')  # of literals that stand one after the other
    files = [f for folder, ends in (("csrc", (".cpp", ".h")), ("python", (".py",))) for f in (ROOT / folder).rglob("*") if f.suffix in ends]
    source = "\n".join(join.sub("", f.read_text()) for f in files)
    quoted = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert len(quoted) > 15
    assert not [text for text in quoted if text not in source]


# Folders whose files pages and scripts name, and where they are.
FOLDERS = [folder for parent in ("csrc", "python/shardtensor") for folder in sorted((ROOT / parent).iterdir()) if folder.is_dir() and folder.name[0] != "_"]
NAMED = re.compile(rf"(?<![\w./-])(?:csrc|python|tests|docs|benchmarks|cmake|examples|\.ci|{'|'.join(sorted({f.name for f in FOLDERS}))})/[\w./{{,}}-]*")


def missing_files(text):
    """The paths in the text of which the source tree has nothing: from its root, from csrc/ or from python/shardtensor; the end may be
    left out (tensor/move). {a,b} is each of both; a path in which something is left open (test_<family>.py, *.h) does not count.
    """
    missing = []
    for m in NAMED.finditer(text.replace("${ROOT}/", "").replace("${CSRC}/", "csrc/").replace("${KERNELS}/", "csrc/kernels/")):
        if m.string[m.end() : m.end() + 1] in ("<", "*", "$", "("):
            continue
        before, _, rest = m[0].partition("{")
        options, _, after = rest.partition("}")
        for name in [before + option + after for option in options.split(",")]:
            name = name.rstrip("./,")
            places = [ROOT / top / (name + end) for top in ("", "csrc", "python/shardtensor") for end in ("", ".h", ".cpp", ".cu", ".py", ".pyi")]
            if not any(place.exists() for place in places):
                missing.append(name)
    return missing


def test_files_that_are_named_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    scripts = [*(ROOT / ".ci").iterdir(), *(ROOT / "cmake").iterdir(), ROOT / "CMakeLists.txt", *(ROOT / "tests").glob("*/CMakeLists.txt")]
    assert len(pages) > 20 and len(scripts) > 8
    named = {str(f.relative_to(ROOT)): missing_files(f.read_text()) for f in (*pages, *scripts)}
    assert {name: missing for name, missing in named.items() if missing} == {}


def test_finds_files_that_are_not_there():
    text = "`tensor/move`, tensor/nowhere.h and `csrc/rules/ops/`; tests/rules/test_<family>.py; ${CSRC}/layout/gone.cpp, rules/test_{a,b}.cpp"
    assert missing_files(text) == ["tensor/nowhere.h", "csrc/layout/gone.cpp", "rules/test_a.cpp", "rules/test_b.cpp"]


def headings(page):
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


def test_links_lead_to_a_page_and_a_heading():
    broken, found = [], set()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, heading = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            found.add(target)
            if not target.exists() or (heading and heading not in headings(target)):
                broken.append((page.name, link))
    assert not broken
    assert set((ROOT / "docs").glob("*.md")) <= found  # every page is linked


def test_readme_names_the_versions_that_the_package_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (python,) = re.findall(r"^>=([\d.]+)$", project["requires-python"])
    (least,) = [re.findall(r"^torch>=([\d.]+)$", d)[0] for d in project["dependencies"] if d.startswith("torch")]
    assert f"Python {python} or newer, torch {least} or newer" in (ROOT / "README.md").read_text()


def test_readme_installs_what_the_examples_import():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r'^.*pip install "\.\[(\w+)\]"$', (ROOT / "README.md").read_text(), re.MULTILINE)
    imported = {m for f in (ROOT / "examples").glob("*.py") for m in re.findall(r"^ *from (\w+)[\w.]* import", f.read_text(), re.MULTILINE)}
    assert imported & {"matplotlib", "numpy", "tqdm"} <= set(extras[named]) and "numpy" in extras[named]


MODULES = ["", ".data", ".debug", ".domain_parallel", ".experimental", ".parallel", ".points", ".random"]


def public(module):
    mode = st.get_promotion_mode()
    found = importlib.import_module(f"shardtensor{module}")
    st.set_promotion_mode(mode)  # importing domain_parallel changes it
    return {name: getattr(found, name) for name in found.__all__}


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings(module):
    missing = []
    for name, thing in public(module).items():
        if not callable(thing) or not getattr(thing, "__module__", "").startswith("shardtensor"):
            continue
        methods = vars(thing).items() if isinstance(thing, type) else ()
        missing += [name] * (not thing.__doc__)
        missing += [f"{name}.{m}" for m, f in methods if not m.startswith("_") and callable(f) and not inspect.getdoc(getattr(thing, m))]
    assert missing == []


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_on_the_page_of_names(module):
    page = (ROOT / "docs/dtensor.md").read_text()
    named = [name for name, thing in public(module).items() if not isinstance(thing, types.ModuleType)]
    assert [name for name in named if not re.search(rf"`(\w+\.)?{name}`", page)] == []
