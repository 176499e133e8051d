"""Who imports whom, read from the source: nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROLES = ("scheduler", "envpool", "rollout", "learner", "weightsync")
PACKAGES = ("segue", *ROLES)


@dataclass(frozen=True)
class Import:
    """One import: the dotted name, and whether it runs when the module is imported."""

    name: str
    at_import: bool


@dataclass
class Module:
    """A module of ours and everything it imports, in functions and for type checkers too."""

    name: str
    path: Path
    imports: list[Import] = field(default_factory=list)

    def imports_any(self, *roots: str) -> list[str]:
        """The imports whose top-level package is one of `roots`."""
        return [i.name for i in self.imports if i.name.partition(".")[0] in roots]


def modules() -> dict[str, Module]:
    """All modules of the packages, by dotted name."""
    found: dict[str, Module] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path)
    for module in found.values():
        tree = ast.parse(module.path.read_text(encoding="utf-8"))
        module.imports = list(_imports(tree.body, module, set(found), True))
    return found


def _imports(body: list[ast.stmt], module: Module, known: set[str], at_import: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, at_import)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path} imports relatively: the rules are read from absolute names"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield Import(submodule if submodule in known else str(node.module), at_import)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.body, module, known, False)
            yield from _imports(node.orelse, module, known, at_import)
        else:
            inside = at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for name in ("body", "orelse", "finalbody"):
                yield from _imports(_statements(node, name), module, known, inside)
            for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from _imports(handler.body, module, known, inside)


def _statements(node: ast.stmt, name: str) -> list[ast.stmt]:
    found = getattr(node, name, [])
    return found if isinstance(found, list) else []


def edges(graph: dict[str, Module]) -> dict[str, set[str]]:
    """Which modules of ours each module imports when it is imported; importing a submodule runs its packages too."""
    result: dict[str, set[str]] = {}
    for module in graph.values():
        targets: set[str] = set()
        for item in module.imports:
            parts = item.name.split(".")
            if item.at_import:
                targets |= {name for i in range(len(parts)) if (name := ".".join(parts[: i + 1])) in graph}
        result[module.name] = targets - {module.name}
    return result


def reaches(graph: dict[str, Module], start: str, roots: tuple[str, ...]) -> list[str]:
    """The chain of modules by which importing `start` imports a package of `roots`; empty if it does not."""
    arrows = edges(graph)
    came_from: dict[str, str] = {start: ""}
    queue = [start, *_packages(start, graph)]
    for package in queue[1:]:
        came_from.setdefault(package, start)
    while queue:
        name = queue.pop(0)
        heavy = [i.name for i in graph[name].imports if i.at_import and i.name.partition(".")[0] in roots]
        if heavy:
            chain = [heavy[0], name]
            while came_from[chain[-1]]:
                chain.append(came_from[chain[-1]])
            return chain[::-1]
        for target in sorted(arrows[name]):
            if target not in came_from:
                came_from[target] = name
                queue.append(target)
    return []


def _packages(name: str, graph: dict[str, Module]) -> list[str]:
    parts = name.split(".")
    return [package for i in range(1, len(parts)) if (package := ".".join(parts[:i])) in graph]


def cycle(graph: dict[str, Module]) -> list[str]:
    """A cycle of imports between modules, or empty. A package's `__init__` is not an importer of itself by its parts."""
    arrows = {name: {t for t in targets if not name.startswith(t + ".")} for name, targets in edges(graph).items()}
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(name: str) -> list[str]:
        state[name] = 1
        path.append(name)
        for target in sorted(arrows[name]):
            if state.get(target) == 1:
                return [*path[path.index(target) :], target]
            if target not in state and (found := visit(target)):
                return found
        path.pop()
        state[name] = 2
        return []

    for name in sorted(arrows):
        if name not in state and (found := visit(name)):
            return found
    return []
