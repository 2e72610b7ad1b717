"""Names in csrc: one name, one meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Types that may share their name with others, and why.
ALLOWED = {
    "List": "a trait: templates take Numbers or Symbols and read Sizes::List",
    "Value": "a trait: templates take any of the random draws and read Draw::Value",
}

NOT_CODE = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"(\w*)\(.*?\)\1" | "(?:\\.|[^"\\\n])*" | (?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+' | ^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
SCOPES = re.compile(
    r"""\b(?:enum\s+(?:class|struct)|struct|class|union|enum)\s+(?:\[\[[^\]]*\]\]\s*|alignas\([^)]*\)\s*)*
          (?P<type>[A-Za-z_]\w*(?:::\w+)*)\s*(?P<arguments><[^;{}]*>\s*)?(?:final\s*)?(?::(?!:)[^;{}()]*(?:\([^)]*\)[^;{}()]*)?)?\{
      | \busing\s+(?P<alias>\w+)\s*=\s*(?P<target>[^;]*);
      | \bnamespace\s*(?P<namespace>[\w:]*)\s*\{
      | (?P<brace>[{}])""",
    re.VERBOSE,
)


def types_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each type that a C++ source defines, in any namespace, class or function; and of each alias that stands
    outside of functions. Not of declarations, specializations, and aliases that repeat a type's own name (using B = A::B).
    """
    code = NOT_CODE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)
    open_scopes: list[str] = []  # per open brace: a type, a namespace, or "" for other blocks
    for m in SCOPES.finditer(code):
        line = code.count("\n", 0, m.start()) + 1
        if m["type"]:
            if not m["arguments"]:
                yield line, m["type"].split("::")[-1]
            open_scopes.append(m["type"])
        elif m["alias"]:
            if "" not in open_scopes and m["target"].strip().split("::")[-1] != m["alias"]:
                yield line, m["alias"]
        elif m["brace"] == "{":
            open_scopes.append("")
        elif m["brace"] == "}":
            open_scopes.pop()
        else:
            open_scopes.append(m["namespace"] or "(unnamed)")
    assert open_scopes == [], "the braces do not match"


def test_a_type_has_a_name_of_its_own():
    places: dict[str, list[str]] = {}
    for file in sorted((ROOT / "csrc").rglob("*")):
        if file.suffix in (".h", ".cpp", ".cu", ".cuh"):
            for line, name in types_of(file.read_text()):
                places.setdefault(name, []).append(f"{file.relative_to(ROOT)}:{line}")
    assert len(places) > 250
    doubled = {name: where for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in doubled.items() if name not in ALLOWED} == {}
    assert sorted(ALLOWED) == sorted(doubled.keys() & ALLOWED), "an exception is no longer needed"


def test_finds_the_types_of_a_source():
    source = """
#define BRACES { {
namespace a::b { // struct NotThis {
class Declared;
template <template <typename> class Kernel, typename... T> class Table final : public Base<Other, 2>, private D { enum Tag : int { x }; };
template <> struct Table<int> { using Inside = int; };
namespace {
struct Outer::Part { char c = '{'; const char* s = "struct InString {"; int n = 1'000; };
enum class Color { Red };
using Pairs = std::vector<std::pair<int, int>>;
using Part = Outer::Part;
void f(struct Argument* x) { using Local = int; struct InFunction { int y; }; if (x) { auto g = [] { return 1; }; } }
} // namespace
union Both { int i; };
}
"""
    assert [name for _, name in types_of(source)] == ["Table", "Tag", "Inside", "Part", "Color", "Pairs", "InFunction", "Both"]
    assert {name: line for line, name in types_of(source)}["Both"] == 14
