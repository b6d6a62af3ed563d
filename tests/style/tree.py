"""The source tree as data: its files, parsed once, with their imports and names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "atoll"

PUBLIC = ["", ".torch", ".jax", ".checkpoint", ".exchange", ".launch"]
PUBLIC += [".store", ".testing"]
PUBLIC += [f".integrations.{name}" for name in ("lightning", "torchft", "transformers")]
"""Packages that users import names from."""


class Import(NamedTuple):
    """One import of one file: `from module import name`, or `import module`."""

    file: Path
    package: str
    module: str
    name: str = ""

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def target(self) -> str:
        """The top-level package of ours that is imported; `atoll` for the root."""
        parts = self.module.split(".")
        if len(parts) > 1:
            return parts[1]
        return self.name if self.name in our_packages() else "atoll"

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)} imports {self.module}"


class Assigned(NamedTuple):
    """One place where a name gets a value."""

    name: str
    line: int
    is_pair: bool
    """Whether the same function assigns both `left` and `right`."""


def python_files(*folders: str) -> list[Path]:
    """Return every Python file under these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def text_of(file: Path) -> str:
    """Return the text of a file."""
    return file.read_text()


@cache
def parse(file: Path) -> ast.Module:
    """Return the syntax tree of a file. Do not change it: all guards share it."""
    return ast.parse(text_of(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file."""
    return tuple(ast.walk(parse(file)))


@cache
def our_packages() -> frozenset[str]:
    """Return the top-level packages and modules of the source tree."""
    modules = {path.stem for path in SOURCE.glob("*.py") if path.stem != "__init__"}
    return frozenset(
        modules | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    )


def package_of(file: Path) -> str:
    """Return the top-level package of a source file; `atoll` for the root's own."""
    parts = file.relative_to(SOURCE).parts
    return "atoll" if parts == ("__init__.py",) else parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    """Return the dotted name of a source file."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> Iterator[Import]:
    """Yield the imports of a file, also those in functions and type checks."""
    package = package_of(file)
    for node in nodes(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, package, alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(file, package, module, alias.name)


@cache
def all_imports() -> tuple[Import, ...]:
    """Return every import of the source tree."""
    return tuple(line for file in python_files("src") for line in imports_of(file))


@cache
def class_homes() -> dict[str, tuple[str, ...]]:
    """Return the modules that define each class name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file in python_files("src"):
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module_of(file))
    return {name: tuple(modules) for name, modules in sorted(homes.items())}


@cache
def module_files() -> dict[str, Path]:
    """Return the file of every module of the source tree."""
    return {module_of(file): file for file in python_files("src")}


@cache
def importers() -> dict[str, frozenset[str]]:
    """Return the modules of `src` that import each module.

    An import of a name that an `__init__` re-exports counts as an import of the module
    that defines the name. The `__init__` itself counts as an importer of names in its
    `__all__` only if no other module imports them. A module whose full name is a string
    somewhere (a lazy import) counts as imported there.
    """
    users: dict[str, set[str]] = {module: set() for module in module_files()}
    tables: dict[str, set[str]] = {module: set() for module in module_files()}
    for line in all_imports():
        user, home = module_of(line.file), _home(line.module, line.name)
        if home in users and home != user:
            is_listed = line.name in exported_names(line.file)
            (tables if is_listed else users)[home].add(user)
    for module, file in module_files().items():
        for node in nodes(file):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and (node.value in users and node.value != module)
            ):
                users[node.value].add(module)
    return {
        module: frozenset(users[module] or tables[module]) for module in module_files()
    }


@cache
def exported_names(file: Path) -> frozenset[str]:
    """Return the names in the `__all__` of an `__init__`; none for other files."""
    if file.name != "__init__.py":
        return frozenset()
    for node in parse(file).body:
        if isinstance(node, ast.Assign) and _name_of(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


@cache
def _home(module: str, name: str) -> str:
    """Return the module that defines what `from module import name` imports."""
    files = module_files()
    if f"{module}.{name}" in files:
        return f"{module}.{name}"
    if module not in files or files[module].name != "__init__.py":
        return module
    for node in nodes(files[module]):
        if isinstance(node, ast.ImportFrom) and node.module != module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _home(node.module or "", alias.name)
    return module


def is_interface(module: str, user: str) -> bool:
    """Return whether a module defines a name that its package lists for others.

    In a public package these are users; in another one, `user` in another package.
    """
    package = ".".join(module.split(".")[:2])
    if user.split(".")[1:2] != module.split(".")[1:2] or user == package:
        return module in _listed_modules(package)
    return any(module in _listed_modules(f"atoll{name}") for name in PUBLIC)


@cache
def _listed_modules(package: str) -> frozenset[str]:
    """Return the modules that define the names in the `__all__` of a package."""
    names = exported_names(module_files()[package])
    return frozenset(_home(package, name) for name in names)


def is_entry_point(module: str) -> bool:
    """Return whether a module is a program, or a verb of the command line."""
    return module in _verbs() or "__name__ ==" in text_of(module_files()[module])


@cache
def _verbs() -> frozenset[str]:
    """Return the modules that `atoll.cli` imports, or names in its table of verbs."""
    modules = set()
    for node in nodes(SOURCE / "cli" / "__init__.py"):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules.add(f"atoll.cli.{node.value}")
    return frozenset(name for name in modules if name.startswith("atoll.cli."))


@cache
def single_importers() -> dict[str, str]:
    """Return the modules that one module of `src` imports, with that module.

    Packages, programs, verbs and interfaces of a package are left out.
    """
    users = {
        module: min(names) for module, names in importers().items() if len(names) == 1
    }
    return {
        module: user
        for module, user in users.items()
        if module_files()[module].name != "__init__.py"
        and not is_interface(module, user)
        and not is_entry_point(module)
    }


@cache
def assigned_names(file: Path) -> tuple[Assigned, ...]:
    """Return the names that a file assigns, parameters and attributes included."""
    return tuple(_assigned(parse(file), is_pair=False))


def _assigned(node: ast.AST, *, is_pair: bool) -> Iterator[Assigned]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names = {name for inner in ast.walk(child) if (name := _name_of(inner))}
            yield from _assigned(child, is_pair={"left", "right"} <= names)
            continue
        if name := _name_of(child):
            yield Assigned(name, getattr(child, "lineno", 0), is_pair)
        yield from _assigned(child, is_pair=is_pair)


def _name_of(node: ast.AST) -> str | None:
    """Return the name that a node assigns."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) if name != "_":
            return name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.arg(arg=name) if name not in {"self", "cls", "_"}:
            return name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            return name
        case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return name
    return None


def docstrings(file: Path) -> Iterator[ast.Constant]:
    """Yield every string that stands alone: docstrings, and those under fields."""
    for node in nodes(file):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def public_docstrings() -> Iterator[tuple[Path, ast.Constant]]:
    """Yield the docstrings that users see of what public packages list.

    These are the docstrings of functions, of classes with their fields and public
    methods, and of the exceptions in `atoll.errors`.
    """
    listed = {
        (_home(f"atoll{package}", name), name)
        for package in PUBLIC
        for name in exported_names(module_files()[f"atoll{package}"])
    }
    for module, file in module_files().items():
        for node in parse(file).body:
            name = getattr(node, "name", "")
            if (module, name) in listed or (module == "atoll.errors" and name):
                yield from ((file, text) for text in _docstrings_within(node))


def _docstrings_within(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of an object and of its public members."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not child.name.startswith("_"):
                yield from _docstrings_within(child)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            yield child.value


class Lines(NamedTuple):
    """How many lines of a file, or of several, are code, and how many import."""

    code: int
    imports: int

    @property
    def share(self) -> float:
        return self.imports / max(self.code, 1)


@cache
def lines_of(file: Path) -> Lines:
    """Count lines of code, which are not blank, a comment or a docstring."""
    prose = {
        line
        for node in docstrings(file)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    code = {
        number
        for number, line in enumerate(text_of(file).splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    } - prose
    imports = {
        line
        for node in nodes(file)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    return Lines(len(code), len(imports & code))
