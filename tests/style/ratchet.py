"""The counts of the guards, which may only fall.

Rule 1: `ratchet.toml` holds exactly the counts of the tree, so that a count that fell
stays down. Rule 2: `update` refuses to raise a count; code that moves to another
package may carry its counts along, if their sum does not rise.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from tests.style.names import name_hits
from tests.style.prose import documents, prose_hits
from tests.style.tree import (
    ROOT,
    SOURCE,
    Lines,
    class_homes,
    lines_of,
    module_files,
    public_docstrings,
    python_files,
    single_importers,
)
from tests.style.words import is_activity

FILE = Path(__file__).with_name("ratchet.toml")
COMMAND = "python -m tests.style --update"

SHARED_CLASSES = {
    "Evaluation": "front ends are twins: atoll.torch and atoll.jax",
    "Island": "front ends are twins: atoll.torch and atoll.jax",
    "IslandCallback": "front ends are twins: transformers and Lightning",
}
"""Class names that may mean several classes, with the reason."""

OWN_MODULES = {
    "atoll.demo.report": "what the demo shows; the verb is in another package",
    "atoll.run_client.move": "slow to import; the verb needs it only after its checks",
    "atoll.run_client.store_past": "makes documents into events; the client uses a run",
    "atoll.telemetry.grafana": "tables of panels and rules; the verb only prints them",
    "atoll.telemetry.trackers": "adapters of wandb, mlflow and trackio",
    "atoll.telemetry.webhook": "adapter of webhooks",
    "atoll.coordinator.commit": "the reduction and the durable writes of a round",
    "atoll.coordinator.operators": "HTTP routes of operators; the app is the process",
    "atoll.exchange.all_reduce.reduction": "its package's entry; `__init__` lists it",
    "atoll.exchange.collective.follower": "what each rank does; the exchange is a port",
    "atoll.exchange.collective.gloo": "adapter of torch's process groups",
    "atoll.exchange.collective.memory": "adapter: a collective of threads",
    "atoll.exchange.over_http": "adapter of HTTP",
    "atoll.http.server": "the path of a request; the listener owns port and threads",
    "atoll.integrations.torchft.island": "the island; the manager is torchft's API",
    "atoll.integrations.torchft.state_transfer": "a protocol, and its byte format",
    "atoll.integrations.transformers.model": "adapter of transformers' model classes",
    "atoll.island.driver": "performs the machine's actions; the host is the face",
    "atoll.island.receipts": "asynchronous rounds; the sync worker runs it in a thread",
    "atoll.island.sync_worker": "all that runs in the background threads of an island",
    "atoll.jax.checkpoint": "adapter of JAX, loaded only for a value of JAX",
    "atoll.kernels.with_numba.codecs": "listed for `kernels.active`",
    "atoll.kernels.with_numba.outer": "listed for `kernels.active`",
    "atoll.kernels.with_numba.topk": "listed for `kernels.active`",
    "atoll.launch.engines.kubernetes.cluster": "adapter of the Kubernetes API",
    "atoll.launch.engines.ray.actors": "adapter: the code of Ray's actors",
    "atoll.simulate.invariants.bucket": "referee of a run that a bucket decides",
    "atoll.simulate.invariants.coordinator": "referee of a run with a coordinator",
    "atoll.simulate.report": "output of `atoll simulate`; the verb only prints it",
    "atoll.store.fsspec": "adapter of fsspec",
    "atoll.store.obstore": "adapter of obstore",
    "atoll.testing.link_flow": "streams and their pace; `link` has port and thread",
    "atoll.torch.checkpoint_arrays": "adapter of tensors and DTensors; no states",
    "atoll.torch.ranks.follower": "one role of a rank; `leader` is the other",
    "atoll.torch.ranks.fragments": "moves vectors among ranks; the memory is the port",
}
"""Modules with one importer that stay modules, with the reason."""


def measure_names() -> dict[str, list[str]]:
    """Return the contentless names of each package."""
    hits: dict[str, list[str]] = defaultdict(list)
    for file in python_files("src", "examples"):
        hits[section_of(file)] += map(str, name_hits(file))
    return hits


def measure_prose() -> dict[str, list[str]]:
    """Return the roundabout phrases of each package and each page."""
    hits: dict[str, list[str]] = defaultdict(list)
    for file in [*python_files("src", "examples"), *documents()]:
        hits[section_of(file)] += map(str, prose_hits(file))
    return hits


def measure_public() -> dict[str, list[str]]:
    """Return the roundabout phrases in docstrings that users see, by package."""
    hits: dict[str, list[str]] = defaultdict(list)
    for file, text in public_docstrings():
        hits[section_of(file)] += [
            str(hit)
            for hit in prose_hits(file)
            if text.lineno <= hit.line <= (text.end_lineno or 0)
        ]
    return hits


def measure_activities() -> dict[str, list[str]]:
    """Return the modules of each package that a gerund or a participle names."""
    return _by_package(
        module for module in module_files() if is_activity(module.split(".")[-1])
    )


def measure_single_importers() -> dict[str, list[str]]:
    """Return the modules of each package that have one importer and no reason."""
    return _by_package(set(single_importers()) - set(OWN_MODULES))


def measure_duplicates() -> dict[str, list[str]]:
    """Return the class names that mean several classes."""
    names = [name for name, homes in class_homes().items() if len(homes) > 1]
    return {"src/atoll": [name for name in names if name not in SHARED_CLASSES]}


GUARDS: dict[str, Callable[[], dict[str, list[str]]]] = {
    "duplicates": measure_duplicates,
    "activities": measure_activities,
    "single_importers": measure_single_importers,
    "names": measure_names,
    "prose": measure_prose,
    "public": measure_public,
}
COUNTED = {"names", "prose", "public"}
"""Guards whose hits are counted in the file; the others' are listed by name."""

Value = int | list[str]


def import_percent() -> float:
    """Return the lines of imports as a share of code, rounded up to 0.1 %."""
    sections = lines_by_section().values()
    return math.ceil(_sum(sections).share * 1000) / 10


def lines_by_section() -> dict[str, Lines]:
    """Return the lines of code and of imports of each package."""
    files: dict[str, list[Lines]] = defaultdict(list)
    for file in python_files("src"):
        files[section_of(file)].append(lines_of(file))
    return {section: _sum(lines) for section, lines in files.items()}


def _sum(lines: Iterable[Lines]) -> Lines:
    code, imports = zip(*lines, strict=True)
    return Lines(sum(code), sum(imports))


@cache
def measure(guard: str) -> dict[str, Value]:
    """Return the hits of a guard in the tree, in the form of the file."""
    return {
        section: len(hits) if guard in COUNTED else sorted(hits)
        for section, hits in sorted(GUARDS[guard]().items())
        if hits
    }


def recorded(guard: str, file: Path = FILE) -> dict[str, Value]:
    """Return the counts or the lists that the file has for a guard."""
    sections: dict[str, dict[str, Value]] = tomllib.loads(file.read_text())
    return {
        section: values[guard]
        for section, values in sections.items()
        if guard in values
    }


def differences(guard: str) -> list[str]:
    """Return, as sentences, where the tree and the file differ for a guard."""
    old, new = recorded(guard), measure(guard)
    return [*rises(guard, old, new), *_falls(guard, old, new)]


def rises(guard: str, old: dict[str, Value], new: dict[str, Value]) -> list[str]:
    """Return, as sentences, the hits of the tree that the file does not allow."""
    sentences = []
    for section in sorted(new):
        before, after = old.get(section), new[section]
        if isinstance(after, list):
            allowed = before if isinstance(before, list) else []
            sentences += [
                f"{section}: {guard}: {name} is new"
                for name in after
                if name not in allowed
            ]
        elif after > (before if isinstance(before, int) else 0):
            sentences.append(
                f"{section}: {guard} rose from {before or 0} to {after}. "
                f"See: python -m tests.style --{guard} {section}"
            )
    return sentences


def _falls(guard: str, old: dict[str, Value], new: dict[str, Value]) -> list[str]:
    sentences = []
    for section in sorted(old):
        before, after = old[section], new.get(section)
        if isinstance(before, list):
            remaining = after if isinstance(after, list) else []
            sentences += [
                f"{section}: {guard}: {name} is no longer one. Run: {COMMAND}"
                for name in before
                if name not in remaining
            ]
        elif before > (after if isinstance(after, int) else 0):
            sentences.append(
                f"{section}: {guard} fell from {before} to {after or 0}. Run: {COMMAND}"
            )
    return sentences


def update(file: Path = FILE, *, is_move: bool = False) -> list[str]:
    """Write the counts of the tree to the file; return why not, as sentences."""
    values = {guard: measure(guard) for guard in GUARDS}
    percent = import_percent()
    refusals: list[str] = []
    if file.exists():
        for guard, new in values.items():
            old = recorded(guard, file)
            if not (is_move and _total(new) <= _total(old)):
                refusals += rises(guard, old, new)
        percent = min(percent, recorded_percent(file))
    if not refusals:
        file.write_text(_as_toml(values, percent))
    return refusals


def recorded_percent(file: Path = FILE) -> float:
    """Return the highest share of import lines that the file allows."""
    percent = recorded("import_percent", file)["src/atoll"]
    assert isinstance(percent, int | float)
    return percent


def _total(values: dict[str, Value]) -> int:
    return sum(
        value if isinstance(value, int) else len(value) for value in values.values()
    )


def section_of(file: Path) -> str:
    """Return the package, top-level module or page whose count a file belongs to."""
    if file.is_relative_to(SOURCE):
        file = SOURCE / file.relative_to(SOURCE).parts[0]
    return file.relative_to(ROOT).as_posix()


def _by_package(modules: Iterable[str]) -> dict[str, list[str]]:
    packages: dict[str, list[str]] = defaultdict(list)
    for module in sorted(modules):
        packages[section_of(module_files()[module])].append(module)
    return packages


def _as_toml(values: dict[str, dict[str, Value]], percent: float) -> str:
    """Return the file's text: one section per package or page, one name per line."""
    lines = [f"# Written by `{COMMAND}`, which refuses to raise a count."]
    sections = sorted({"src/atoll", *(s for new in values.values() for s in new)})
    for section in sections:
        lines += ["", f'["{section}"]']
        if section == "src/atoll":
            lines.append(f"import_percent = {percent}")
        for guard, new in values.items():
            value = new.get(section)
            if isinstance(value, list):
                names = [f'    "{name}",' for name in value]
                lines += [f"{guard} = [", *names, "]"]
            elif value is not None:
                lines.append(f"{guard} = {value}")
    return "\n".join(lines) + "\n"
