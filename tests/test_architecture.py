"""The house rules that a machine can hold: floors, file sizes, no pickle, no swallowed errors, light imports.

Nearly everything is read from the source with `ast`, so an import inside a function or under TYPE_CHECKING counts like
any other.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import isles

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "isles"

# Imports only go down; rooms of one floor are siblings and do not know each other.
FLOORS = {
    "base": -1,
    "network": 0,
    "comm": 1,
    "models": 1,
    "data": 1,
    "membership": 2,
    "launch": 2,
    "replicas": 3,
    "pipeline": 3,
    "memory": 3,
    "training": 4,
    "plan": 5,
    "running": 6,
    "experts": 7,
    "report": 7,
    "papers": 8,
    "cli": 9,
}
# The other files of isles/ itself are the lazy front door, above every room.
FRONT_DOOR = {"__init__", "__main__"}
# The command is where a person asks for a report, so it alone may call its neighbour.
SIDEWAYS = {("cli", "report")}

MAX_LINES = 700

MAX_FILES = 24  # in a folder, so that it can be read as a list
MANY_FILES = {"isles/replicas/methods"}  # a file a method, each found by its paper's name
# What a method that composes its parts fills in; the order of things is the loop's alone.
HOOKS = {"compose", "adapt", "advise", "gauges", "outer_state", "load_outer_state"}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
TENSOR_MAKERS = {
    f"torch.{name}"
    for name in ("arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
                 "randperm", "tensor", "zeros")
}  # fmt: skip
HEAVY = ("torch", "resvg_py", "scipy", "transformers")
# Lines of what a file imports, and of what those import, at 1b670daa: readers, and commands, should come to no more.
CLOSURES = {
    "isles.replicas.methods.diloco": 11_364,
    "isles.training.config.sections": 6_661 * 65 // 100,
    "isles.training.trainer": 30_726 * 60 // 100,  # at 6bac3fba
}
NO_TORCH_ROOMS = ("report", "network")  # `isles report` and `isles plan` answer without loading torch


# ---------------------------------------------------------------------------------------------------------------------
# Reading the source


@cache
def sources() -> dict[Path, ast.Module]:
    """Every file, parsed once. They stay to the end, so the garbage collector, which would walk them again and again
    (four fifths of the time), leaves them alone.
    """
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
    gc.disable()
    try:
        return {path: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in paths}
    finally:
        gc.freeze()
        gc.enable()


def source_files() -> list[Path]:
    return [*sources()]


def parse(path: Path) -> ast.Module:
    return sources()[path]


@cache
def ruled(tree: ast.Module) -> list[ast.AST]:
    """The nodes that the rules on whole files look at, in the order of `ast.walk`."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.ExceptHandler)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def where(path: Path, node: ast.AST | None = None) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def absolute(base: str, level: int, package: str) -> str:
    """The full name of a relative import: `from ..x import y` in package a.b has level 2 and base x, so a.x."""
    if level == 0:
        return base
    parts = package.split(".")
    head = ".".join(parts[: len(parts) - level + 1])
    return f"{head}.{base}" if base else head


def imported_modules(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[ast.AST, str]]:
    """Every dotted name that an import statement, or import_module("..."), names; `from a import b` gives a.b."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ruled(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level, package)
            for alias in node.names:
                yield node, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and called_name(node).rpartition(".")[2] in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                name = first.value.lstrip(".")
                yield node, absolute(name, len(first.value) - len(name), package)


def called_name(call: ast.Call) -> str:
    """`torch.load(...)` gives "torch.load"; a call of anything but a dotted name gives what can be read of it."""
    return dotted(call.func)


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


# ---------------------------------------------------------------------------------------------------------------------
# The rules, each a function from source to complaints, so that they can be tried on made-up source below


def room_of(module: str) -> str | None:
    """The room of a dotted name inside isles; None for the front door and its files."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else None


def floor_complaints(tree: ast.Module, module: str, is_package: bool) -> list[tuple[ast.AST, str]]:
    here = room_of(module)
    if here is None:
        return []
    complaints = []
    for node, name in imported_modules(tree, module, is_package):
        if name.partition(".")[0] != "isles":
            continue
        there = room_of(name)
        if there == here or (here, there) in SIDEWAYS:
            continue
        if there is None:
            complaints.append((node, f"{here} imports {name}, which is the front door above every room"))
        elif FLOORS[there] > FLOORS[here]:
            complaints.append((node, f"{here} (floor {FLOORS[here]}) imports up: {name} (floor {FLOORS[there]})"))
        elif FLOORS[there] == FLOORS[here]:
            complaints.append((node, f"{here} imports its sibling {name} (floor {FLOORS[there]})"))
    return complaints


def module_named(name: str, modules: Container[str]) -> str | None:
    """The one of `modules` that a dotted name is in: a.b.c of an imported function c is the module a.b."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or over others, together; `imports`: whom each one names."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        reached[start], new = set(), imports[start]
        while new:
            reached[start] |= new
            new = {further for module in new for further in imports.get(module, ())} - reached[start]
    found = {tuple(sorted(other for other in reached[one] if one in reached[other])) for one in imports}
    return [list(circle) for circle in sorted(found) if circle]


def imports_between(sources: dict[str, tuple[ast.Module, bool]]) -> dict[str, set[str]]:
    """Whom of `sources` (name: source, whether it is a package) each one imports, wherever in the file."""
    return {
        module: {
            there for _, name in imported_modules(tree, module, is_package) if (there := module_named(name, sources))
        }
        for module, (tree, is_package) in sources.items()
    }


def only_for_checkers(tree: ast.Module) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING:`."""
    blocks = (node for node in tree.body if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING")
    return {node for block in blocks for node in ast.walk(block)}


def closure(start: str, sources: dict[str, tuple[ast.Module, bool]]) -> set[str]:
    """`start`, the modules of `sources` that it imports, wherever in the file but not for type checkers alone, and
    whatever those import. `from a import b` counts a as well as a.b.
    """
    found, new = set(), {start}
    while new:
        module = new.pop()
        found.add(module)
        tree, is_package = sources[module]
        idle = only_for_checkers(tree)
        for node, name in imported_modules(tree, module, is_package):
            if node not in idle and isinstance(node, ast.Import | ast.ImportFrom):
                owner = name.rpartition(".")[0] if isinstance(node, ast.ImportFrom) else name
                new |= {there for one in (name, owner) if (there := module_named(one, sources))}
        new -= {*found, "isles"}
    return found


def unsafe_complaints(tree: ast.Module, module: str, is_package: bool) -> list[tuple[ast.AST, str]]:
    complaints = []
    for node, name in imported_modules(tree, module, is_package):
        if name.partition(".")[0] in UNSAFE_MODULES:
            complaints.append((node, f"imports {name}: what a peer or a disk sends must not be unpickled"))
    for node in ruled(tree):
        if not isinstance(node, ast.Call):
            continue
        name = called_name(node)
        keywords = {k.arg: k.value for k in node.keywords}
        if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            complaints.append((node, f"calls {name}()"))
        elif name == "torch.load" and not is_constant(keywords.get("weights_only"), True):
            complaints.append((node, "torch.load without weights_only=True"))
        elif "allow_pickle" in keywords and not is_constant(keywords["allow_pickle"], False):
            complaints.append((node, f"{name} with allow_pickle"))
        elif re.search(r"(_object|_object_list)$", name) and name.partition(".")[0] in ("torch", "dist", "distributed"):
            complaints.append((node, f"{name} unpickles what a peer sends"))
    return complaints


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def maker_complaints(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    """Tensors made in the caller's default dtype, or on the caller's default device."""
    return [
        (node, f"{called_name(node)} without {name}=: a user's default would change it")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called_name(node) in TENSOR_MAKERS
        for name in ("dtype", "device")
        if name not in {keyword.arg for keyword in node.keywords}
    ]


def swallow_complaints(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    complaints = []
    for node in ruled(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                complaints.append((node, "bare except"))
            elif catches_all(node.type) and all(is_idle(statement) for statement in node.body):
                complaints.append((node, "swallows every Exception in silence"))
        elif isinstance(node, ast.Call) and called_name(node) in ("suppress", "contextlib.suppress"):
            complaints += [(node, "suppresses every Exception") for argument in node.args if catches_all(argument)]
    return complaints


def catches_all(node: ast.AST) -> bool:
    names = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(dotted(name).rpartition(".")[2] in ("Exception", "BaseException") for name in names)


def is_idle(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass | ast.Continue) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The rules on the source of isles


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def listed(complaints: list[str]) -> str:
    return "\n" + "\n".join(complaints)


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in source_files()} - FRONT_DOOR
    assert rooms <= FLOORS.keys(), f"no floor for {sorted(rooms - FLOORS.keys())}: add it to FLOORS"


def test_imports_only_go_down() -> None:
    complaints = [
        f"{where(path, node)} {text}"
        for path in source_files()
        for node, text in floor_complaints(parse(path), module_name(path), path.name == "__init__.py")
    ]
    assert not complaints, listed(complaints)


def test_no_files_import_each_other() -> None:
    found = circles(imports_between(by_module()))
    assert not found, listed([" <-> ".join(circle) for circle in found])


def test_plan_and_report_stay_free_of_torch() -> None:
    complaints = [
        f"{where(path, node)} imports {name}"
        for path in source_files()
        if room_of(module_name(path)) in NO_TORCH_ROOMS
        for node, name in imported_modules(parse(path), module_name(path), path.name == "__init__.py")
        if name.partition(".")[0] == "torch"
    ]
    assert not complaints, listed(complaints)


def by_module() -> dict[str, tuple[ast.Module, bool]]:
    return {module_name(path): (parse(path), path.name == "__init__.py") for path in source_files()}


@pytest.mark.parametrize("module", CLOSURES)
def test_what_a_file_pulls_in_is_bounded(module: str) -> None:
    lines = {module_name(path): lines_of(path) for path in source_files()}
    pulled = closure(module, by_module())
    assert sum(lines[name] for name in pulled) <= CLOSURES[module], listed(sorted(pulled))


def test_settings_stand_apart_from_torch() -> None:
    """Those of every section, and of every method."""
    sources = by_module()
    starts = {"isles.training.config.sections", *(row.config.partition(":")[0] for row in isles.METHODS.values())}
    complaints = [
        f"{module}:{getattr(node, 'lineno', 1)} imports {name}"
        for module in sorted(set().union(*(closure(start, sources) for start in starts)))
        for node, name in imported_modules(sources[module][0], module, sources[module][1])
        if name.partition(".")[0] == "torch"
    ]
    assert not complaints, listed(complaints)


def test_no_file_is_too_long_to_hold() -> None:
    complaints = [f"{where(p)} has {lines_of(p)} lines" for p in source_files() if lines_of(p) > MAX_LINES]
    assert not complaints, f"more than {MAX_LINES} lines; one concept a file:{listed(complaints)}"


def test_new_tensors_name_their_dtype_and_device() -> None:
    """Where Isles computes; models are made as the user's defaults say."""
    complaints = [
        f"{where(path, node)} {text}"
        for path in source_files()
        if room_of(module_name(path)) not in ("models", "cli")
        for node, text in maker_complaints(parse(path))
    ]
    assert not complaints, listed(complaints)
    bad = ast.parse("torch.zeros(3, dtype=x); torch.tensor(1.0, device=y); torch.ones(2, dtype=x, device=y)")
    assert [text.split(":")[0] for _, text in maker_complaints(bad)] == [
        "torch.zeros without device=",
        "torch.tensor without dtype=",
    ]


def test_the_loop_knows_no_method() -> None:
    complaints = [
        f"{where(path, node)} imports {name}"
        for path in source_files()
        if module_name(path).startswith("isles.replicas.loop")
        for node, name in imported_modules(parse(path), module_name(path), path.name == "__init__.py")
        if name.startswith("isles.replicas.methods")
    ]
    assert not complaints, listed(complaints)


def class_definitions(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def base_names(node: ast.ClassDef) -> set[str]:
    """The last part of each base's name; `Generic[T]` counts as Generic."""
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {dotted(base).rpartition(".")[2] for base in bases}


def ancestors(name: str, bases: dict[str, set[str]]) -> set[str]:
    """Every class above `name`, as far as the classes of `bases` tell."""
    found: set[str] = set()
    new = set(bases.get(name, ()))
    while new:
        found |= new
        new = {above for below in new for above in bases.get(below, ())} - found
    return found


def defined_names(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """What a class's body defines: functions, and names that it assigns (a bare annotation assigns nothing)."""
    found: dict[str, ast.stmt] = {}
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            found |= {name.id: statement for name in statement.targets if isinstance(name, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            found[dotted(statement.target)] = statement
    return found


def hook_complaints(classes: list[ast.ClassDef], base: str, hooks: set[str]) -> list[tuple[ast.stmt, str]]:
    """Classes under `base` that define functions of it, or of the classes above it, other than `hooks`."""
    bases = {node.name: base_names(node) for node in classes}
    above = {base} | ancestors(base, bases)
    functions = {
        name
        for node in classes
        if node.name in above
        for name, statement in defined_names(node).items()
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    public = {name for name in functions if not name.startswith("_")}
    return [
        (statement, f"{node.name} defines {name}, which is {base}'s: a method fills in {', '.join(sorted(hooks))}")
        for node in classes
        if base in ancestors(node.name, bases)
        for name, statement in defined_names(node).items()
        if name in functions - hooks
        or (isinstance(statement, ast.FunctionDef) and not name.startswith("_") and name not in public)
    ]


def test_methods_of_parts_fill_in_hooks_and_nothing_else() -> None:
    homes = {node: path for path in source_files() for node in class_definitions(parse(path))}
    found = hook_complaints(list(homes), "OuterSync", HOOKS)
    at = {statement: path for node, path in homes.items() for statement in node.body}
    assert not found, listed([f"{where(at[statement], statement)} {text}" for statement, text in found])
    bases = {node.name: base_names(node) for node in homes}
    assert sum("OuterSync" in ancestors(name, bases) for name in bases) >= 16, "nobody derives from OuterSync?"


def crowded(files: Iterable[Path], root: Path, most: int) -> list[str]:
    """Folders under `root` with more Python files than that."""
    counts = Counter(path.parent.relative_to(root).as_posix() for path in files)
    return [f"{folder} has {count} files" for folder, count in counts.items() if count > most]


def test_no_folder_is_a_heap() -> None:
    complaints = [text for text in crowded(source_files(), ROOT, MAX_FILES) if text.split()[0] not in MANY_FILES]
    assert not complaints, f"more than {MAX_FILES}; make rooms in the room:{listed(complaints)}"


def names_for_checkers(tree: ast.Module) -> set[tuple[str, str]]:
    """(module, name) of what is imported under TYPE_CHECKING as itself, which re-exports it."""
    return {
        (statement.module or "", alias.name)
        for block in tree.body
        if isinstance(block, ast.If) and dotted(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name
    }


def test_the_table_of_methods_is_the_only_one() -> None:
    """Type checkers see the classes that METHODS names; the built-in settings and the planner know no other method."""

    from isles.plan.question import candidates
    from isles.replicas import METHODS

    places = {tuple(row.target.split(":")) for row in METHODS.values()}
    assert names_for_checkers(parse(PACKAGE / "replicas" / "__init__.py")) == places
    assert all(getattr(isles, name).__module__ == module for module, name in places)
    embedded = tomllib.loads((PACKAGE / "training" / "config" / "embedded.toml").read_text(encoding="utf-8"))
    assert set(embedded["methods"]) <= set(METHODS)
    assert {one.method for one in candidates()} == set(METHODS)


def names_in(tree: ast.Module) -> set[str]:
    """Every name that the code of a module mentions, its imports and the texts of annotations included."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return names | {
        dotted(node).rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)
    }


def test_the_base_of_methods_knows_no_kind_of_replica() -> None:
    nodes = [node for path in source_files() for node in class_definitions(parse(path))]
    bases = {node.name: base_names(node) for node in nodes}
    kinds = {name for name in bases if "Replica" in ancestors(name, bases)}
    assert {"Plain", "Copies", "Shards"} <= kinds
    known = names_in(parse(PACKAGE / "replicas" / "sync.py"))
    assert "Replica" in known
    assert not known & kinds, f"replicas/sync.py names {sorted(known & kinds)}: ask the replica instead"


HEAPS = {
    "network/engine.py": "the queue of events of simulated time, and the heads of a line",
    "comm/virtual/scheduler.py": "workers by whose turn it is",
    "network/routing/events.py": "the tasks of a worker that could start",
    "network/routing/search.py": "a makespan in a fraction of a replay's time, for searches",
    "memory/lanes.py": "the queue of one lane",
    "memory/engines/base.py": "the queue of one lane, in real time",
}


def test_simulated_time_has_one_engine() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in source_files()
        for _, name in imported_modules(parse(path), module_name(path), path.name == "__init__.py")
        if name.split(".")[0] == "heapq"
    }
    assert found == set(HEAPS), "simulate time with isles.network.engine.EventQueue, or say here what the heap is for"


def names_of_types(tree: ast.Module) -> list[str]:
    """Public classes and type aliases at the top of a module; type variables stand for nothing by themselves."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            call = node.value.func if isinstance(node.value, ast.Call) else None
            if not (isinstance(call, ast.Name) and call.id in ("TypeVar", "ParamSpec")):
                found.append(node.targets[0].id)
    return [name for name in found if re.fullmatch(r"[A-Z][a-z0-9]\w*|[A-Z]{2,}[a-z]\w*", name)]


def test_a_name_stands_for_one_thing() -> None:
    """No two modules of the package have a public class or type alias of one name."""
    homes: dict[str, list[str]] = {}
    for path in source_files():
        for name in names_of_types(parse(path)):
            homes.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_name_rule_sees_classes_and_aliases_alone() -> None:
    source = (
        "class Line: ...\nEvent = list[int]\nOwn = TypeVar('Own')\nLIMIT = 3\n_Hidden = int\nclass DDP: ...\nx = 1\n"
    )
    assert names_of_types(ast.parse(source)) == ["Line", "Event"]


def test_nothing_is_unpickled_or_evaluated() -> None:
    complaints = [
        f"{where(path, node)} {text}"
        for path in source_files()
        for node, text in unsafe_complaints(parse(path), module_name(path), path.name == "__init__.py")
    ]
    assert not complaints, listed(complaints)


def test_the_engine_of_elastic_worlds_is_behind_one_file() -> None:
    users = {
        module_name(path)
        for path in source_files()
        for _, name in imported_modules(parse(path), module_name(path), path.name == "__init__.py")
        if name.startswith("isles.membership.hub.") and module_name(path) != "isles.membership.hub"
    }
    assert users == {"isles.membership.tls_session"}


def test_texts_are_parsed_in_one_place() -> None:
    """isles/base/parsing.py measures them first: whoever reads elsewhere takes 20 GB for 200 kB of TOML."""
    calls = [f"{module}.{name}" for module in ("json", "tomllib", "tomlkit") for name in ("load", "loads", "parse")]
    readers = [path for path in source_files() if any(f"{call}(" in path.read_text(encoding="utf-8") for call in calls)]
    found = [
        f"{where(path, node)} calls {called_name(node)}: use isles.base.parsing"
        for path in readers
        for node in ruled(parse(path))
        if isinstance(node, ast.Call) and called_name(node) in calls
    ]
    assert not found, listed(found)


def test_no_error_is_swallowed() -> None:
    complaints = [f"{where(p, node)} {text}" for p in source_files() for node, text in swallow_complaints(parse(p))]
    assert not complaints, listed(complaints)


def defined_in(tree: ast.Module) -> set[str]:
    """Names that a module defines or imports, those of its classes and functions included."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias | ast.Name)]
    return {node.id if isinstance(node, ast.Name) else node.name for node in nodes}


def test_modules_and_objects_that_texts_name_exist() -> None:
    """`isles.x.y` in sources and pages; modules at the start of a line of a package's docstring."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {
        (name, path)
        for path in [*source_files(), *pages]
        for name in re.findall(r"`(isles(?:\.\w+)+)", path.read_text(encoding="utf-8"))
    }
    modules, methods = by_module(), defined_in(parse(PACKAGE / "replicas" / "__init__.py"))
    for name, path in named:
        module = module_named(name, modules) or ""
        known = defined_in(modules[module][0]) | (methods if module == "isles" else set())
        assert {*name.removeprefix(module).split(".")} <= {"", *known}, f"{where(path)}: {name}"
    for module, (tree, is_package) in modules.items():
        listed = re.findall(r"^`(\w+)`  ", ast.get_docstring(tree) or "", re.MULTILINE) if is_package else []
        assert {f"{module}.{name}" for name in listed} <= {*modules}, module


def test_parameters_that_docstrings_explain_exist() -> None:
    """`name: ...` at the start of a sentence is a name, or a word that is a value, in the class or function."""
    for path, tree in sources().items():
        for node in class_definitions(tree) + [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]:
            first = node.body[0]  # faster than ast.get_docstring
            text = first.value.value if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else ""
            if explained := re.findall(r"(?:^|[.]\s+)((?:[a-z_]+, )*[a-z_]{2,}): ", str(text)):
                known = {vars(one).get(key) for one in ast.walk(node) for key in ("id", "arg", "attr", "name", "value")}
                assert {*", ".join(explained).split(", ")} <= known, f"{where(path, node)}: {explained}"


def test_every_public_module_says_what_it_is() -> None:
    public = [p for p in source_files() if not p.name.startswith("_") or p.name == "__init__.py"]
    complaints = [where(path) for path in public if not ast.get_docstring(parse(path))]
    assert not complaints, f"no module docstring:{listed(complaints)}"


@pytest.mark.parametrize(
    "module",
    ["isles", "isles.cli", "isles.report", "isles.training.lighthouse.rounds", "isles.training.lighthouse.peers"],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"import {module} loads {done.stdout.strip()}; import it where it is used"


# ---------------------------------------------------------------------------------------------------------------------
# The rules on made-up source: a check that never fires guards nothing


@pytest.mark.parametrize(
    ("module", "line", "fires"),
    [
        ("isles.comm.group", "from isles.network import links", False),
        ("isles.comm.group", "from .transport import Work", False),
        ("isles.comm.group", "from isles.models import sizes", True),
        ("isles.comm.group", "from ..models import sizes", True),
        ("isles.comm.group", "from .. import models", True),
        ("isles.network.links", "import isles.comm.group", True),
        ("isles.replicas.methods.noloco", "def f():\n    from isles.training import config", True),
        ("isles.replicas.methods.noloco", "if TYPE_CHECKING:\n    from isles.pipeline.executor import Executor", True),
        ("isles.running.run", "import importlib\nimportlib.import_module('isles.cli')", True),
        (
            "isles.running.run",
            "from importlib import import_module\nimport_module('..cli', __package__)",
            True,
        ),
        ("isles.running.run", "from isles.replicas import sync", False),
        ("isles.running.run", "from isles import __version__", True),
        ("isles.running.run", "from isles.base.version import __version__", False),
        ("isles.running.run", "from isles import NoLoCo", True),
        ("isles.cli.train", "from isles.report import write_report", False),
        ("isles.report.page", "from isles.cli import train", True),
        ("isles.comm.group", "from isles.base.errors import unknown_name", False),
        ("isles.base.errors", "from isles.network import links", True),
        ("isles.__main__", "from isles.replicas import sync", False),
    ],
)
def test_floor_rule_fires(module: str, line: str, fires: bool) -> None:
    assert bool(floor_complaints(ast.parse(line), module, is_package=False)) == fires


@pytest.mark.parametrize(
    ("base", "user", "found"),
    [
        ("import torch", "from isles.comm.base import Base", []),
        (
            "from isles.comm.user import User",
            "from isles.comm.base import Base",
            [["isles.comm.base", "isles.comm.user"]],
        ),
        ("def make():\n    from .user import User", "from . import base", [["isles.comm.base", "isles.comm.user"]]),
        (
            "if TYPE_CHECKING:\n    from isles.comm import user",
            "from .base import B",
            [["isles.comm.base", "isles.comm.user"]],
        ),
        (
            "from isles.comm import Group",
            "from isles.comm.base import Base",
            [["isles.comm", "isles.comm.base", "isles.comm.user"]],
        ),
        ("from isles.comm.base import Base", "", [["isles.comm.base"]]),
    ],
)
def test_circle_rule_fires(base: str, user: str, found: list[list[str]]) -> None:
    package = ast.parse("from isles.comm.user import User")
    sources = {
        "isles.comm": (package, True),
        "isles.comm.base": (ast.parse(base), False),
        "isles.comm.user": (ast.parse(user), False),
    }
    assert circles(imports_between(sources)) == found


def test_closure_rule_fires() -> None:
    """Imports in functions count, and of a package what is imported from it; those for type checkers alone do not."""
    user = "if TYPE_CHECKING:\n    from isles.c import C\nfrom isles import a\ndef f():\n    from isles.b.d import D"
    sources = {name: (ast.parse("import torch"), False) for name in ("isles.a", "isles.b", "isles.b.d", "isles.c")}
    sources |= {"isles.user": (ast.parse(user), False), "isles.b": (ast.parse(""), True)}
    assert closure("isles.user", sources) == {"isles.user", "isles.a", "isles.b.d"}
    sources["isles.user"] = ast.parse("from isles.b import d, e"), False
    assert closure("isles.user", sources) == {"isles.user", "isles.b", "isles.b.d"}


@pytest.mark.parametrize(
    ("line", "fires"),
    [
        ("import pickle", True),
        ("from pickle import loads", True),
        ("torch.load(f)", True),
        ("torch.load(f, weights_only=False)", True),
        ("torch.load(f, weights_only=True)", False),
        ("numpy.load(f, allow_pickle=True)", True),
        ("eval('1')", True),
        ("model.eval()", False),
        ("exec(code)", True),
        ("dist.all_gather_object(out, x)", True),
        ("dist.all_gather(out, x)", False),
    ],
)
def test_unsafe_rule_fires(line: str, fires: bool) -> None:
    assert bool(unsafe_complaints(ast.parse(line), "isles.comm.x", is_package=False)) == fires


@pytest.mark.parametrize(
    ("handler", "fires"),
    [
        ("except:\n    raise", True),
        ("except Exception:\n    pass", True),
        ("except (OSError, Exception):\n    ...", True),
        ("except Exception as error:\n    fail(error)", False),
        ("except OSError:\n    pass", False),
    ],
)
def test_swallow_rule_fires(handler: str, fires: bool) -> None:
    assert bool(swallow_complaints(ast.parse(f"try:\n    work()\n{handler}"))) == fires
    assert swallow_complaints(ast.parse("with suppress(Exception):\n    work()"))


def test_method_rule_sees_indirect_descent() -> None:
    tree = ast.parse("class OuterSync(ReplicaSync): ...\nclass A(outer.OuterSync[int]): ...\nclass B(A): ...")
    bases = {node.name: base_names(node) for node in class_definitions(tree)}
    assert ancestors("B", bases) == {"A", "OuterSync", "ReplicaSync"}
    assert ancestors("Unknown", bases) == set()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def compose(self): ...", []),
        ("Config = Mine\n    reading: Reading = Eager()\n    config: Mine", []),
        ("def _rule(self): ...", []),
        ("def after_inner_step(self): ...", ["after_inner_step"]),
        ("def step(self): ...", ["step"]),
        ("finish = other", ["finish"]),
        ("def _exchange(self): ...", ["_exchange"]),
        ("async def settle(self): ...", ["settle"]),
        ("def another_public_thing(self): ...", ["another_public_thing"]),
    ],
)
def test_hook_rule_fires(body: str, told: list[str]) -> None:
    """On the class itself, and on one derived from it in another file."""
    for derived in ("OuterSync", "Between"):
        tree = ast.parse(
            "class ReplicaSync:\n    def step(self): ...\n    def settle(self): ...\n"
            "class OuterSync(ReplicaSync):\n    def compose(self): ...\n    def finish(self): ...\n"
            "    def after_inner_step(self): ...\n    def _exchange(self): ...\n"
            f"class Between(OuterSync): ...\nclass Mine({derived}):\n    {body}\n"
            "class Apart(ReplicaSync):\n    def step(self): ...\n"
        )
        found = hook_complaints(class_definitions(tree), "OuterSync", HOOKS)
        assert [text.split()[2].rstrip(",") for _, text in found] == told


def test_heap_rule_fires() -> None:
    files = [ROOT / "isles" / "one" / f"{number}.py" for number in range(3)] + [ROOT / "isles" / "two.py"]
    assert crowded(files, ROOT, 2) == ["isles/one has 3 files"] and crowded(files, ROOT, 3) == []


def test_table_rule_fires() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    from a.b import C as C\n    from a import D\nfrom a import E as E")
    assert names_for_checkers(tree) == {("a.b", "C")}
