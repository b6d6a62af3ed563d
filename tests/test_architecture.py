"""The tree is the diagram: imports point down, and importing is light."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from typing import NamedTuple

import pytest

from atoll.protocol.coordinator_state import CoordinatorState
from tests.style.tree import (
    ROOT,
    SOURCE,
    Import,
    all_imports,
    nodes,
    our_packages,
    parse,
    python_files,
    text_of,
)

FORBIDDEN_IN_PURE_CODE = {
    "asyncio",
    "concurrent",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "tempfile",
    "threading",
    "time",
}
JUNK_DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "core"}
# An example is read at one sitting; the demo trains twice and prints a table.
MAX_LINES = {"src": 700, "tests": 800, "bench": 600, "examples": 150}


class Row(NamedTuple):
    """One row of the table in ARCHITECTURE.md."""

    ours: frozenset[str]
    others: frozenset[str]


def dependency_table() -> dict[str, Row]:
    """Read the rows of ARCHITECTURE.md, in their order."""
    rows = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and (name := re.fullmatch(r"`([\w.]+)`", cells[0])):
            rows[name[1]] = Row(_words(cells[2]), _words(cells[3]))
    return rows


def violations(table: dict[str, Row]) -> list[str]:
    """Return, as sentences, the imports that no row allows."""
    return [str(found) for found in all_imports() if not _is_allowed(found, table)]


def _is_allowed(found: Import, table: dict[str, Row]) -> bool:
    importer = _part_of(".".join(found.file.relative_to(SOURCE).parts), table)
    row = table[importer or found.package]
    if found.top != "atoll":
        return found.top in sys.stdlib_module_names or found.top in row.others
    if found.target != found.package:
        return found.target in row.ours
    # Inside a package, a part with a row of its own is another package. The package's
    # `__init__` is a table of contents, and lists names of its parts too.
    if found.file == SOURCE / found.package / "__init__.py":
        return True
    imported = f"{found.module}.{found.name}".removeprefix("atoll.")
    part = _part_of(imported, table) or found.package
    return part == (importer or found.package) or part in row.ours


def _part_of(module: str, table: dict[str, Row]) -> str | None:
    """Return the row of a part of a package that a module goes by, if there is one."""
    part = ".".join(module.split(".")[:2])
    return part if "." in part and part in table else None


def _words(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"`([\w.]+)`", cell))


def run_python(code: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_imports_point_down() -> None:
    """No package imports anything its row of ARCHITECTURE.md does not list."""
    assert violations(dependency_table()) == []


def test_an_import_that_points_up_is_found() -> None:
    """The check can fail: without its row's permissions, the root is a violation."""
    table = dependency_table()
    table["atoll"] = Row(frozenset(), frozenset())

    assert "__init__.py imports atoll.settings" in violations(table)


def test_an_import_of_a_part_that_points_up_is_found() -> None:
    """A package may not import its part that has a row of its own, below it."""
    file = SOURCE / "launch" / "command.py"
    table = dependency_table()
    up = Import(file, "launch", "atoll.launch.engines.local", "files")
    named = Import(file, "launch", "atoll.launch", "engines")
    down = Import(SOURCE / "launch/engines/ray.py", "launch", "atoll.launch", "spec")

    assert not _is_allowed(up, table)
    assert not _is_allowed(named, table)
    assert _is_allowed(down, table)


def test_every_row_lists_only_rows_above_it() -> None:
    """The table itself has no cycle."""
    seen: set[str] = set()
    for package, row in dependency_table().items():
        assert row.ours <= seen, f"{package} lists a row that is not above it"
        seen.add(package)


def test_the_table_names_exactly_the_packages_there_are() -> None:
    """Every package has a row, and every row has a package, or a part of one."""
    rows = set(dependency_table())
    parts = {row for row in rows if "." in row}

    assert rows - parts == our_packages() | {"atoll"}
    assert all((SOURCE / part.replace(".", "/")).is_dir() for part in parts)


def test_every_package_says_what_it_owns() -> None:
    """A package's docstring has its three sentences."""
    for file in SOURCE.glob("*/__init__.py"):
        text = ast.get_docstring(parse(file)) or ""
        assert text.startswith("Owns "), file
        assert "Does not know " in text, file
        assert "Start reading at " in text, file


def test_imports_are_absolute() -> None:
    """No relative import hides where a name comes from."""
    assert [str(each) for each in all_imports() if each.module.startswith(".")] == []


@pytest.mark.parametrize("package", ["algorithm", "data", "plan", "protocol"])
def test_pure_code_knows_no_time_and_no_machine(package: str) -> None:
    """Nothing in pure code imports a clock, randomness, threads, files or sockets."""
    found = [
        str(each)
        for each in all_imports()
        if each.package == package and each.top in FORBIDDEN_IN_PURE_CODE
    ]

    assert found == []


def test_nothing_pickles() -> None:
    """No source file imports a module that executes what it reads."""
    unsafe = {"pickle", "_pickle", "cPickle", "dill", "marshal", "shelve"}

    assert [str(each) for each in all_imports() if each.top in unsafe] == []


STATE_CLASSES = {"CoordinatorState", "Round", "Members", "LiveMembers"}
STATE_CHANGES = {"with_member", "with_round", "with_update", "with_counted", "opening"}
"""Methods that return a changed state, round or table of members."""

STATE_HOMES = ("protocol/", "coordinator/restore.py")


def state_changes(tree: ast.Module) -> list[str]:
    """Return the calls that make a `CoordinatorState` other than by `advance`."""
    fields = {field.name for field in dataclasses.fields(CoordinatorState)}
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        own_name, subject = name.rpartition(".")[2], call.args[:1]
        given = {keyword.arg for keyword in call.keywords}
        is_copy = own_name in ("replace", "changed") and bool(given & fields)
        is_of_state = any(ast.unparse(one).endswith("state") for one in subject)
        if (
            own_name in STATE_CLASSES | {"changed"}
            or (own_name in STATE_CHANGES and "." in name)
            or (is_copy and is_of_state)
        ):
            found.append(f"line {call.lineno}: {name}")
    return found


def test_only_the_machine_changes_the_state_of_a_run() -> None:
    """Hosts and observers apply events; none of them assigns a state by hand."""
    found = {
        path: calls
        for file in python_files("src")
        if not (path := file.relative_to(SOURCE).as_posix()).startswith(STATE_HOMES)
        and (calls := state_changes(parse(file)))
    }

    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "self.state = changed(self.state, epoch=1)",
        "view.state = replace(view.state, is_paused=True)",
        "state = CoordinatorState(run='run', settings=settings)",
        "members = self._view.state.members.with_member(member)",
        "round = Round(fragment=0, number=1)",
    ],
)
def test_a_state_that_is_changed_by_hand_is_found(line: str) -> None:
    """The rule above has no gap that the code before it would have fitted."""
    assert len(state_changes(ast.parse(line))) == 1


def test_one_function_builds_every_reply_to_a_join() -> None:
    """All exchanges answer by `protocol`; the API reads what a coordinator has sent."""
    found = {
        file.relative_to(SOURCE).as_posix()
        for file in python_files("src")
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "JoinReply"
    }

    assert found == {"protocol/join_leave.py", "exchange/api/messages.py"}


def test_numba_has_one_home() -> None:
    """Only the compiled kernels import numba, and nothing writes LLVM by hand."""
    homes = {
        each.file.relative_to(SOURCE).as_posix()
        for each in all_imports()
        if each.top == "numba"
    }

    assert [str(each) for each in all_imports() if each.top == "llvmlite"] == []
    assert homes
    assert [home for home in homes if not home.startswith("kernels/with_numba")] == []


def test_public_names_are_listed() -> None:
    """What a user can import from the root is exactly what was promised."""
    code = (
        "import atoll, types\n"
        "print(sorted(n for n, v in vars(atoll).items() if not n.startswith('_')\n"
        "    and (n in atoll.__all__ or not isinstance(v, types.ModuleType))\n"
        "    and n != 'TYPE_CHECKING'))\n"
        "print([hasattr(atoll, name) for name in atoll.__all__])\n"
        "print(atoll.__all__)\n"
    )

    eager, resolved, listed = run_python(code).splitlines()

    assert eager == "['RunEnded', 'errors']"
    assert resolved == "[True, True, True, True, True, True, True, True, True]"
    assert listed == (
        "['RunEnded', 'RunSettings', '__version__', 'checkpoint', 'data', "
        "'errors', 'exchange', 'init', 'settings_of']"
    )


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    """Lazy names do not turn a misspelt one into something else."""
    code = "import atoll\ntry: atoll.exchnage\nexcept AttributeError as e: print(e)"

    assert run_python(code).strip() == "module 'atoll' has no attribute 'exchnage'"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("atoll", {"torch", "jax", "numba", "numpy", "typer", "atoll.settings"}),
        ("atoll", {"cryptography", "rich", "atoll.coordinator", "atoll.cli"}),
        ("atoll.exchange", {"torch", "jax", "typer"}),
        ("atoll.checkpoint", {"torch", "jax", "typer"}),
        ("atoll.cli", {"torch", "jax", "numpy", "rich", "atoll.settings"}),
    ],
)
def test_importing_is_light(module: str, absent: set[str]) -> None:
    """Importing a package loads no framework that it does not need."""
    loaded = run_python(f"import sys, {module}\nprint(*sys.modules)").split()

    assert absent & set(loaded) == set()


@pytest.mark.parametrize("folder", sorted(MAX_LINES))
def test_no_file_is_too_long(folder: str) -> None:
    """A file that outgrows its folder's limit has become two ideas."""
    longest = {
        path.relative_to(ROOT).as_posix(): len(text_of(path).splitlines())
        for path in python_files(folder)
    }

    assert {k: v for k, v in longest.items() if v > MAX_LINES[folder]} == {}


def test_no_function_must_be_scrolled() -> None:
    """No function of the source tree is longer than 80 lines."""
    too_long = [
        f"{file.relative_to(ROOT)}: {each.name}"
        for file in python_files("src")
        for each in nodes(file)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and (each.end_lineno or 0) - each.lineno >= 80
    ]

    assert too_long == []


def test_every_test_says_what_must_hold() -> None:
    """Read alone, the docstrings of the tests are the specification."""
    silent = [
        f"{file.relative_to(ROOT)}: {each.name}"
        for file in python_files("tests")
        for each in nodes(file)
        if isinstance(each, ast.FunctionDef)
        and each.name.startswith("test_")
        and not ast.get_docstring(each)
    ]

    assert silent == []


def test_no_junk_drawers() -> None:
    """No file is named by a word that says nothing, and `base` is a port's file."""
    names = {path.relative_to(ROOT) for path in python_files("src", "tests", "bench")}
    drawers = {
        path.as_posix() for path in names if JUNK_DRAWERS & set(path.stem.split("_"))
    }
    bases = {path.as_posix() for path in names if path.stem == "base"}

    assert drawers == set()
    assert bases <= {
        "src/atoll/disk/base.py",
        "src/atoll/exchange/base.py",
        "src/atoll/island/base.py",
        "src/atoll/launch/base.py",
        "src/atoll/run_client/base.py",
        "src/atoll/store/base.py",
    }
