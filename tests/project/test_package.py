"""The package around the extension: its type stub, its metadata, its generated documentation."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from pathlib import Path

import pytest
import shardtensor
import torch
import torch.distributed.tensor
from shardtensor import _C
from shardtensor._late import when_imported

ROOT = Path(__file__).parents[2]


def members(thing):
    return {n for n in dir(thing) if not n.startswith("_") or n in ("__eq__", "__hash__")} - set(dir(object))


def test_the_stub_names_what_the_extension_has():
    tree = ast.parse((ROOT / "python/shardtensor/_C.pyi").read_text())
    top = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert set(top) == members(_C)
    for name, node in top.items():
        if isinstance(node, ast.ClassDef):
            values = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # of an enum
            stubbed = values | {n.name for n in node.body if isinstance(n, ast.FunctionDef)} - set(dir(object))
            assert stubbed == members(getattr(_C, name)), name


def argument_names(node):
    return [a.arg for a in node.args.posonlyargs + node.args.args if a.arg != "self"]


def test_the_stub_takes_as_many_arguments():
    # "name(arg0: int, shape: Sequence[int], x: int = 0) -> None": one comma-free colon per argument.
    tree = ast.parse((ROOT / "python/shardtensor/_C.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = (getattr(_C, node.name).__doc__ or "").splitlines()[0]
            inside = first[first.index("(") + 1 : first.rindex(") ->")]
            assert len(re.findall(r"\b\w+: ", inside)) == len(argument_names(node)), first


def test_every_public_name_is_there():
    assert sorted(shardtensor.__all__) == list(shardtensor.__all__)
    for name in shardtensor.__all__:
        assert hasattr(shardtensor, name)


def test_offers_every_name_of_torch_distributed_tensor():
    assert set(torch.distributed.tensor.__all__) <= set(shardtensor.__all__)


def test_the_class_declares_the_methods_that_are_added():
    """For type checkers, since the class may not import what builds on it."""
    cls = next(n for n in ast.parse((ROOT / "python/shardtensor/tensor/_tensor.py").read_text()).body if getattr(n, "name", "") == "ShardTensor")
    declared = [n for n in cls.body if isinstance(n, ast.If)][-1]
    names = [n.name if isinstance(n, ast.FunctionDef) else n.target.id for n in declared.body]
    assert [n for n in names if not callable(getattr(shardtensor.ShardTensor, n, None))] == []
    for method in (n for n in declared.body if isinstance(n, ast.FunctionDef)):
        static = any(d.id == "staticmethod" for d in method.decorator_list)
        added = inspect.getattr_static(shardtensor.ShardTensor, method.name)
        assert isinstance(added, staticmethod) == static, method.name
        function = added.__func__ if static else added
        parameters = list(inspect.signature(function).parameters.values())[not static :]
        given = [ast.unparse(a) for a in ast.walk(method.args) if isinstance(a, ast.arg)][not static :]
        assert [f"{p.name}: {p.annotation}" for p in parameters] == given, method.name
        defaults = [p.default for p in parameters if p.default is not p.empty]
        assert defaults == [ast.literal_eval(d) for d in (*method.args.defaults, *method.args.kw_defaults) if d], method.name


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == shardtensor.__version__


def test_test_requirements_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "tests/requirements.txt").read_text().split()
    assert lines == project["project"]["optional-dependencies"]["test"]


def why_it_does_not_load(torch_version, built_for, *first):
    """The last line of a failed import. first: folders searched before the package's own."""
    package = Path(shardtensor.__file__).parent
    program = f"""
import sys, types
import torch
torch.__version__ = {torch_version!r}
package = types.ModuleType("shardtensor"); package.__path__ = {[str(p) for p in (*first, package)]!r}
sys.modules["shardtensor"] = package
build = types.ModuleType("shardtensor._build"); build.TORCH = {built_for!r}
sys.modules["shardtensor._build"] = package._build = build
sys.meta_path = [f for f in sys.meta_path if isinstance(f, type)]  # an editable install's knows where its modules are
import shardtensor._load
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("torch_version", "built_for", "says"),
    [
        ("2.10.0", "2.10.0", "torch 2.10.0 is too old; 2.11 or newer is needed"),
        ("2.99.0", "2.15.0", "built for torch 2.15.0, but torch 2.99.0 is installed"),
    ],
)
def test_another_torch_is_named_in_one_line(torch_version, built_for, says):
    last = why_it_does_not_load(torch_version, built_for)
    assert last.startswith("ImportError: shardtensor: ") and says in last


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to build an extension that misses a symbol")
def test_a_symbol_that_torch_lacks_is_named_in_one_line(tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text('extern "C" void gone_from_libtorch(); extern "C" void* PyInit__C() { gone_from_libtorch(); return nullptr; }')
    built = tmp_path / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["c++", "-shared", "-fPIC", source, "-o", built], check=True)
    last = why_it_does_not_load(torch.__version__, torch.__version__, tmp_path)
    assert last.startswith(f"ImportError: shardtensor: the extension does not load with torch {torch.__version__}: ")
    assert "undefined symbol: gone_from_libtorch" in last


def test_the_coverage_page_is_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "docs/coverage.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_brings_little_of_torch_along():
    # What makes `import shardtensor` slow is never its own code, but torch's checkpoints, FSDP and compiler.
    program = """
import sys
import sysconfig
import torch.distributed.tensor
before = set(sys.modules)
import shardtensor
print(*sorted(m for m in set(sys.modules) - before if m.startswith("torch")))
"""
    path = {"PYTHONPATH": str(Path(shardtensor.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | path)
    brought = done.stdout.splitlines()[-1].split()  # an editable install may build first, and say so
    assert [m for m in brought if not m.startswith("torch.distributed.tensor.")] == []


def test_import_brings_only_what_training_needs():
    program = """
import sys
import shardtensor
print(*sorted(m.removeprefix("shardtensor.") for m in sys.modules if m.startswith("shardtensor.")))
"""
    path = {"PYTHONPATH": str(Path(shardtensor.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | path)
    brought = done.stdout.splitlines()[-1].split()
    rooms = {m.split(".")[0] for m in brought}
    assert rooms == {"_C", "_build", "_late", "_load", "_methods", "debug", "device_mesh", "patches", "random", "tensor"}
    assert [m for m in brought if m.startswith("patches.")] == ["patches._patch", "patches.ending", "patches.flops"]
    assert "debug._watch" not in brought and "debug._explain" not in brought


def test_what_waits_for_an_import_gets_the_whole_module(tmp_path, monkeypatch):
    """Also if another thread is still importing it, and again if it raised."""
    (tmp_path / "slow_to_import.py").write_text("import time\nstarted = True\ntime.sleep(1)\nlast = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    thread = threading.Thread(target=importlib.import_module, args=("slow_to_import",))
    thread.start()
    while not hasattr(sys.modules.get("slow_to_import"), "started"):
        time.sleep(0.01)
    found = []

    def then(module):
        if not found:
            found.append("raised")
            raise ValueError("once")
        found.append(module.last)

    try:
        assert not hasattr(sys.modules["slow_to_import"], "last")
        with pytest.raises(ValueError, match="once"):
            when_imported("slow_to_import", then)
        when_imported("slow_to_import", lambda module: found.append(module.last))
        assert found == ["raised", 7, 7]
    finally:
        thread.join()
        del sys.modules["slow_to_import"]


@pytest.mark.parametrize("package", ["shardtensor", "shardtensor.debug"])
def test_names_that_are_imported_late_are_there(package):
    """In a fresh process, in which nothing has asked for them."""
    program = f"""
import pickle, sys
import {package} as package
assert set(package.__all__) <= set(dir(package)), set(package.__all__) - set(dir(package))
assert len(set(dir(package))) == len(dir(package))
found = {{}}
exec("from {package} import *", found)
assert all(found[name] is getattr(package, name) is vars(package)[name] for name in package.__all__)
for thing in found.values():
    if isinstance(thing, type) and thing.__module__.startswith("shardtensor"):
        assert pickle.loads(pickle.dumps(thing)) is thing
try:
    package.no_such_name
except AttributeError as error:
    assert str(error) == "module '{package}' has no attribute 'no_such_name'"
else:
    sys.exit("no_such_name is there")
"""
    path = {"PYTHONPATH": str(Path(shardtensor.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | path)


def test_folders_are_attributes_without_an_import_of_their_own():
    program = "import shardtensor; shardtensor.data.read; shardtensor.debug.check; shardtensor.shards; shardtensor.checkpoint; shardtensor.parallel"
    path = {"PYTHONPATH": str(Path(shardtensor.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | path)


def test_ops_have_typed_entries_by_their_signatures():
    """Whatever their names; no op is named for it."""

    def is_typed(name):
        (line,) = [k for k in torch._C._dispatch_dump(f"aten::{name}").splitlines() if k.startswith("PrivateUse2: shardtensor")]
        return "unboxed" in line

    typed = ["add.Tensor", "relu", "floor", "logical_and", "squeeze.dim", "mul_.Tensor", "cat", "stack", "_foreach_exp", "_fused_adam_"]
    boxed = ["topk", "add.out", "squeeze_", "squeeze_.dim", "convolution", "_foreach_exp.out", "_foreach_addcmul.Tensor"]
    assert [n for n in typed if not is_typed(n)] == [] and [n for n in boxed if is_typed(n)] == []


def test_the_design_lists_all_state_of_the_process():
    kept = re.compile(
        r"""^(?:thread_local|inline\ std::atomic|std::atomic|std::array<std::atomic|PyObject\*|PyTypeObject\*)[^()]*\b[gt]_\w+
        |^\s+static\ (?!const|inline\ const|PyMethodDef|std::mutex)[\w:<>,* ]+\w[{;=\ ]+(?:=\ |nullptr|0\}|$)
        |^\s+static\ std::deque
        |^inline\ Observer<
        |\bof_thread<\w+>\(\)
        |mutable\ std::atomic<uint64_t>""",
        re.MULTILINE | re.VERBOSE,
    )
    csrc = ROOT / "csrc"
    holders = {str(f.relative_to(csrc)) for f in csrc.rglob("*") if f.suffix in (".h", ".cpp") and kept.search(f.read_text())}
    table = (ROOT / "docs/design.md").read_text().split("## State that outlives a call")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert holders == {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_each_folder_of_the_extension_includes_only_those_above_it():
    tree = (ROOT / "docs/design.md").read_text().split("csrc/\n")[1].split("```")[0]
    order, outer = [], ""
    for indent, name in re.findall(r"^( +)([a-z]+)/ ", tree, re.MULTILINE):
        outer = outer if len(indent) > 2 else name
        order.append(f"{outer}/{name}" if len(indent) > 2 else name)
    csrc, wrong = ROOT / "csrc", []
    assert {str(f.relative_to(csrc)) for f in csrc.iterdir() if f.is_dir()} == {name for name in order if "/" not in name}

    def place(path):
        folder = str(path.parent)
        return order.index(folder if folder in order else path.parts[0])

    for source in (f.relative_to(csrc) for f in csrc.rglob("*.*") if f.parent != csrc):
        for included in re.findall(r'^#include "(\w+/[\w/]+\.c?u?h)"', (csrc / source).read_text(), re.MULTILINE):
            if place(Path(included)) > place(source):
                wrong.append(f"{source} includes {included}")
    assert wrong == []


def circles(graph):
    """The groups of more than one node of a graph, in which each node reaches all others (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(node):
        number[node] = lowest[node] = len(number)
        path.append(node)
        for target in graph.get(node, ()):
            if target not in number:
                visit(target)
            if target in path:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == number[node]:
            group = path[path.index(node) :]
            del path[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def test_no_files_of_the_extension_include_each_other():
    """File by file, where x.h and x.cpp are one module: x.cpp must not need what needs x.h."""
    assert circles({"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": []}) == [["a", "b", "c"]]
    csrc = ROOT / "csrc"
    modules: dict[str, set[str]] = {}
    for source in (f for f in csrc.rglob("*.*") if f.suffix in (".h", ".cpp", ".cu", ".cuh")):
        name = str(source.relative_to(csrc).with_suffix(""))
        included = re.findall(r'^\s*#\s*include "([^"]+)"', source.read_text(), re.MULTILINE)
        assert [i for i in included if not (csrc / i).exists()] == [], source
        modules.setdefault(name, set()).update({i.rsplit(".", 1)[0] for i in included} - {name})
    assert len(modules) > 100
    assert circles(modules) == []


def unnamed(source):
    """What a C++ source defines in its unnamed namespaces, each as one text: types, aliases, functions by their parameters' types, variables."""
    for block in re.findall(r"^namespace \{$(.*?)^\} // namespace$", source, re.MULTILINE | re.DOTALL):
        text = re.sub(r"//.*", "", block)
        for name in re.findall(r"^(?:struct|class|enum(?: class)?) (\w+)[^;]*?\{", text, re.MULTILINE):
            yield name
        for name, what in re.findall(r"^using (\w+) = ([^;]*);", text, re.MULTILINE):
            yield f"{name} = {what}"
        for name, parameters in re.findall(r"^(?!struct|class|enum|using|return)[\w:][^;{}=]*?\b(\w+)\(([^;{}]*)\)[\w >&:,-]*\{", text, re.MULTILINE):
            types = [re.sub(r" = .*|\b\w+$", "", " ".join(p.split())).strip() for p in re.split(r",(?![^<(]*[>)])", parameters)]
            yield f"{name}({', '.join(types)})"
        for name in re.findall(r"^(?:constexpr|const|thread_local|std::atomic)\b[^;(){}]*?\b(\w+)(?:\[\w*\])*(?: =|\{|;)", text, re.MULTILINE):
            yield name


def test_names_in_unnamed_namespaces_differ_within_a_folder():
    """cmake/units.cmake compiles sources of a folder together."""
    source = "namespace {\nstruct S {\n};\nusing A = int;\nconstexpr int kOne = 1;\nvoid f(int a, const B<C, D>& b) {\n}\n} // namespace\n"
    assert list(unnamed(source)) == ["S", "A = int", "f(int, const B<C, D>&)", "kOne"]
    csrc = ROOT / "csrc"
    of_headers = {name: str(f) for f in csrc.rglob("*.h") for name in named_types(f.read_text())}
    places: dict[tuple[str, str], set[str]] = {}
    for f in csrc.rglob("*.cpp"):
        text = f.read_text()
        around = re.findall(r"^namespace ([\w:]+) \{$", text, re.MULTILINE)
        for name in unnamed(text):
            key, alias, _ = name.partition(" = ")
            found = places.setdefault((str(f.parent.relative_to(csrc)), key), set())
            found.add(name if alias else str(f))
            if not alias:  # a type of the same namespace, which another source of the unit may include
                found.update(of_headers[n] for n in (f"{outer}::{key}" for outer in around) if n in of_headers)
    assert len(places) > 1000
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def named_ops(source):
    """The ops that a C++ source adds to the registry by name."""
    calls = re.findall(r"\badd(?:_forms)?\((?:\s*[\w\"]+,\s*\{([^{}]*)\}|(\"\w+\"),)", source)
    return [name for listed, alone in calls for name in re.findall(r'"([^"]+)"', listed or alone)]


def test_an_op_is_named_once():
    """By its entry, which has its rule, its calls and its formula; nothing else is registered for torch's ops. Forms that
    add_forms() makes, and names that are put together, are compared when the registry is filled: a second one raises."""
    assert named_ops('r.add("a", {"x"}, f); r.add_forms(\n "a",\n {\n "y.Tensor",\n "x",\n },\n f, o); add("z", g);') == ["x", "y.Tensor", "x", "z"]
    sources = {str(f.relative_to(ROOT)): f.read_text() for f in (ROOT / "csrc").rglob("*.cpp")}
    places: dict[str, list[str]] = {}
    for file, source in sources.items():
        for name in named_ops(source):
            places.setdefault(name, []).append(file)
    assert len(places) > 700
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
    elsewhere = {f for f, source in sources.items() if re.search(r"TORCH_LIBRARY_(?:IMPL|FRAGMENT)\(aten\b|\binstalled_op\(\"aten::", source)}
    assert elsewhere <= {"csrc/autograd/gradients.cpp"}  # asks how as_strided would run


def named_types(source):
    """The types that a C++ source defines outside of unnamed namespaces, each with the names around it."""
    text = re.sub(r'//.*|/\*.*?\*/|"(?:\\.|[^"\\])*"', "", source, flags=re.DOTALL if "/*" in source else 0)
    around: list[str | None] = []  # per open brace: a name, "" for an unnamed namespace, None for a block
    for m in re.finditer(r"\bnamespace\s*([\w:]*)\s*\{|\b(?:struct|class|enum|union)\s+(?:class\s+)?([\w:]+)[^;{}()=]*\{|[{}]", text):
        namespace, kind = m.groups()
        if m.group() == "}":
            around.pop()
        elif kind is not None:
            around.append(kind)
            if all(around):
                yield "::".join(map(str, around))
        else:
            around.append(namespace)


def test_a_type_is_defined_once():
    """Two types of one name in one namespace emit the same weak symbols: a build that is not optimized then calls the wrong ones."""
    places: dict[str, list[str]] = {}
    for f in sorted((ROOT / "csrc").rglob("*.*")):
        if f.suffix in (".h", ".cpp", ".cu", ".cuh"):
            for name in named_types(f.read_text()):
                places.setdefault(name, []).append(str(f.relative_to(ROOT)))
    assert len(places) > 100
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
    twice = "namespace a { namespace { struct S {}; } struct S { struct T {}; }; } namespace a { struct S {}; }"
    assert list(named_types(twice)) == ["a::S", "a::S::T", "a::S"]
