"""The specification of an island, the same for every engine.

Rule 1: there is no field for the run's settings: the run owns them, and an island
receives a run and no value that must match.
Rule 2: a secret is named, never written.
Rule 3: a spec that no engine could run is refused here; one that a single engine cannot
run is refused by that engine.

The command, as a user writes it after `--`:

    train.py --lr 1         a script
    -m package.train        a module
    package.train:main      a function, called with the arguments as text
    python train.py         the same as train.py: the Python of the island's machine
    python -c CODE          that Python again, which torchrun cannot start
    ./anything              a program

A secret, by reference:

    env:NAME        in the environment of the process that launches
    file:PATH       in a file that only this user may read, on this machine
    engine:NAME     stored by the engine under that name; `NAME/KEY` if it has several

The first two are read when islands are launched, and reach them by the engine's own
mechanism for secrets. None is ever part of a command line, a plan or a handle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import CorruptError, UsageError
from atoll.fields import FieldLanguage, JsonField
from atoll.security import Secret
from atoll.security.private_files import read_private

MAX_ISLANDS = 4096
MAX_NAME = 40
"""Characters: with an index behind, a label of DNS takes it, and so does any engine."""

PREFIX = "ATOLL_"
PASS, PASS_FILE, CHARTER = "ATOLL_PASS", "ATOLL_PASS_FILE", "ATOLL_CHARTER"
"""Variables of `launch.credentials`, which the bootstrap removes."""

ALLOWED_VARIABLES = frozenset(
    {
        "ATOLL_CERTIFICATE",
        "ATOLL_CERTIFICATE_KEY",
        "ATOLL_HEARTBEAT_S",
        "ATOLL_TOKEN_FILE",
        "ATOLL_TRUST_CODE",
    }
)
"""Variables of Atoll that a user may set: paths on the island's host, its heartbeat,
and whose code may run there."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|(API|ACCESS|PRIVATE)_?KEY)$", re.I)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that one island needs; None leaves the choice to the engine."""

    cpus: float | None = None
    memory_bytes: int | None = None
    accelerators: int = 0
    """GPUs, or the devices that `accelerator` names."""

    accelerator: str | None = None
    """The model, as the engine names it: `a100`, `l40s`, `v5e`."""

    time_limit_s: float | None = None
    """The engine ends an island after this time; it receives SIGTERM before."""

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(
                    f"{name}={value} must be above 0 and finite. Give more."
                )
        if self.accelerators < 0:
            raise UsageError(f"accelerators={self.accelerators} is less than none.")
        if self.accelerator is not None and self.accelerators == 0:
            raise UsageError(
                f"accelerator={self.accelerator!r} is named, and accelerators=0. Say "
                "how many an island has."
            )


MAX_DOUBLED = 100
"""Doublings of a pause, at most: any pause is longer than the longest by then."""

_STORED = {
    "max_restarts": "most",
    "crash_window_s": "at_once_s",
    "max_crashes": "most_at_once",
}
"""Fields of `Restarts` whose keys differ in stored launches and on command lines."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """The restart policy of an island whose command failed.

    An engine with its own policy does the nearest that it can; its page documents that.
    """

    max_restarts: int = 100
    """Restarts of one island, at most."""

    first_pause_s: float = 1.0
    """Pause before the first restart. It doubles with every crash in a row."""

    longest_pause_s: float = 60.0
    crash_window_s: float = 20.0
    """A command that fails within this time after its start has crashed."""

    max_crashes: int = 3
    """Crashes in a row after which the island is not restarted."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or self.max_crashes < 1:
            raise UsageError(
                f"max_restarts={self.max_restarts} must be at least 0, and "
                f"max_crashes={self.max_crashes} at least 1."
            )
        if not 0 <= self.first_pause_s <= self.longest_pause_s < math.inf:
            raise UsageError(
                f"first_pause_s={self.first_pause_s} must be within 0 and "
                f"longest_pause_s={self.longest_pause_s}."
            )

    def pause_s(self, num_crashes: int) -> float:
        """Return the pause before a restart after this many crashes in a row."""
        doubled = min(max(0, num_crashes - 1), MAX_DOUBLED)
        return float(min(self.first_pause_s * 2.0**doubled, self.longest_pause_s))

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as stored with a launch and passed to its supervisor."""
        return {_STORED.get(name, name): value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Restarts:
        """Return the policy that `to_dict` wrote; a missing key means its default.

        Raises:
            UsageError: a key is unknown, or a number is out of range.
        """
        return RESTARTS.read(stored, "restarts")


def _restarts(**stored: Any) -> Restarts:
    names = {key: name for name, key in _STORED.items()}
    return Restarts(**{names.get(key, key): value for key, value in stored.items()})


LANGUAGE = FieldLanguage()
TEXT = LANGUAGE.where(lambda value: True, "text")
"""Any text; a command may have bytes that are not UTF-8, as surrogates."""

MAYBE_TEXT, TEXTS = LANGUAGE.maybe(TEXT), LANGUAGE.mapping(TEXT)
MAX_TEXTS = 2**16
RESTARTS: JsonField[Restarts] = LANGUAGE.table(
    _restarts,
    {},
    optional={
        **dict.fromkeys(("most", "most_at_once"), LANGUAGE.integer()),
        **dict.fromkeys(
            ("first_pause_s", "longest_pause_s", "at_once_s"), LANGUAGE.number()
        ),
    },
)
RESOURCES: JsonField[Resources] = LANGUAGE.table(
    Resources,
    {
        **dict.fromkeys(("cpus", "time_limit_s"), LANGUAGE.maybe(LANGUAGE.number())),
        "memory_bytes": LANGUAGE.maybe(LANGUAGE.integer()),
        "accelerators": LANGUAGE.integer(),
        "accelerator": MAYBE_TEXT,
    },
)


@dataclass(frozen=True, kw_only=True)
class IslandSpec:
    """The specification of all islands of a launch; they differ in their index."""

    command: tuple[str, ...]
    """A script, `-m` and a module, `module:function`, or a program; and arguments."""

    run: str
    """The run's URL: a coordinator's, or a store's. It must be valid on the hosts of
    the islands, too."""

    name: str
    """Island 3 is `name-3`."""

    processes: int = 1
    """Processes of one island; torchrun starts several."""

    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """References to values, by variable: see the module's docstring."""

    directory: str | None = None
    """The working directory on the island's host; None for the engine's default."""

    code: str | None = None
    """The digest of code that was stored with the run, which an island fetches and
    starts in; None if the host has the code already."""

    image: str | None = None
    """A container image with Python, Atoll and the requirements of the command."""

    requirements: tuple[str, ...] = ()
    """Packages for pip to install, if there is no image."""

    resources: Resources = Resources()
    restarts: Restarts = Restarts()

    def __post_init__(self) -> None:
        check_command(self.command, processes=self.processes)
        check_name(self.name)
        if not self.run:
            raise UsageError("No run was given. Islands need one: a URL or a path.")
        for variable in self.environment:
            _check_variable(variable)
            _require_no_secret(variable)
        for variable, reference in self.secrets.items():
            _check_variable(variable)
            check_reference(variable, reference)
        if both := sorted(self.environment.keys() & self.secrets.keys()):
            raise UsageError(f"{both[0]} is given as a secret and in the open.")
        if self.image is not None and self.requirements:
            raise UsageError(
                f"image={self.image!r} and requirements={self.requirements} exclude "
                "each other: an image has what it needs. Leave one out."
            )
        if self.code is not None and not _DIGEST.fullmatch(self.code):
            raise UsageError(f"code={self.code!r} is no digest of 64 hex digits.")

    def island(self, index: int) -> str:
        """Return the name of an island, the same in every incarnation."""
        return f"{self.name}-{index}"


def check_name(name: str) -> str:
    """Return a name of a launch.

    Raises:
        UsageError: it is none.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise UsageError(
            f"name={name[:80]!r} cannot begin the names of islands: it has to be lower "
            f"case letters, digits and hyphens, a letter first, at most {MAX_NAME}."
        )
    return name


def _check_variable(variable: str) -> None:
    if not _VARIABLE.fullmatch(variable):
        raise UsageError(f"{variable[:80]!r} is no name of an environment variable.")
    if variable.startswith(PREFIX) and variable not in ALLOWED_VARIABLES:
        raise UsageError(
            f"{variable} cannot be given: the launcher sets the variables of an "
            "island, and the run owns its settings. Change those in the run file."
        )


def _require_no_secret(variable: str) -> None:
    if variable not in ALLOWED_VARIABLES and _SECRET.search(variable):
        raise UsageError(
            f"{variable} looks like a secret, which is never given by value. Say where "
            f"it is: --secret {variable}=env:{variable}, or file:PATH."
        )


def spec_to_form(spec: IslandSpec) -> dict[str, Any]:
    """Return a spec as JSON values. It has references to secrets, and no secret."""
    return asdict(spec) | {"restarts": spec.restarts.to_dict()}


def spec_from_form(form: Any) -> IslandSpec:
    """Return the spec that `spec_to_form` wrote.

    Raises:
        CorruptError: it is not a spec.
    """
    try:
        return _SPEC.read(form, "spec")
    except UsageError as exc:
        raise CorruptError(f"That is no spec of an island: {exc}") from exc


_SPEC: JsonField[IslandSpec] = LANGUAGE.table(
    IslandSpec,
    {
        **dict.fromkeys(("run", "name"), TEXT),
        **dict.fromkeys(("directory", "code", "image"), MAYBE_TEXT),
        **dict.fromkeys(("environment", "secrets"), TEXTS),
        **dict.fromkeys(
            ("command", "requirements"), LANGUAGE.listed(TEXT, max_items=MAX_TEXTS)
        ),
        "processes": LANGUAGE.integer(),
        "resources": RESOURCES,
        "restarts": RESTARTS,
    },
)


MAX_ARGUMENTS, MAX_ARGUMENTS_BYTES = 1024, 2**16

FUNCTION_COMMAND = "atoll.launch.function_command"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def check_command(command: Sequence[str], *, processes: int) -> None:
    """Check a command.

    Raises:
        UsageError: it is empty, too long, or torchrun cannot start it.
    """
    if not command or not command[0]:
        raise UsageError(
            "There is no command. Write it after --, for example: -- python train.py"
        )
    size = sum(len(argument.encode("utf-8", "surrogateescape")) for argument in command)
    if len(command) > MAX_ARGUMENTS or size > MAX_ARGUMENTS_BYTES:
        raise UsageError(
            f"The command has {len(command)} words and {size} bytes; at most "
            f"{MAX_ARGUMENTS} and {MAX_ARGUMENTS_BYTES} are allowed. Use a file."
        )
    if any("\0" in argument for argument in command):
        raise UsageError("The command has a word with a zero byte, which none can.")
    if processes < 1:
        raise UsageError(f"processes={processes}: an island has 1 or more.")
    if processes > 1 and python_argv(command) is None:
        raise UsageError(
            f"processes={processes} needs a script, -m MODULE or module:function for "
            f"torchrun to start, and {command[0]!r} is a program."
        )


def python_argv(command: Sequence[str]) -> list[str] | None:
    """Return the arguments of Python for a command, or None if it is not Python."""
    argv = list(command)
    if _PYTHON.fullmatch(argv[0]) and len(argv) > 1:
        argv = argv[1:]
    if argv[0] == "-m":
        return argv if len(argv) > 1 else None
    if argv[0].endswith(".py"):
        return argv
    return ["-m", FUNCTION_COMMAND, *argv] if _FUNCTION.fullmatch(argv[0]) else None


def is_python(command: Sequence[str]) -> bool:
    """Return whether the Python of the island's host runs a command."""
    argv = python_argv(command)
    return argv is not None or _PYTHON.fullmatch(command[0]) is not None


def full_argv(
    command: Sequence[str], *, processes: int, python: str = "python"
) -> list[str]:
    """Return the argv to execute, with the Python of the island's host."""
    arguments = python_argv(command)
    if arguments is None:
        return [python, *command[1:]] if is_python(command) else list(command)
    if processes > 1:
        return [python, *TORCHRUN, f"--nproc-per-node={processes}", *arguments]
    return [python, *arguments]


MAX_SECRET_BYTES = 2**16
KINDS = ("env", "file", "engine")


def check_reference(variable: str, reference: str) -> tuple[str, str]:
    """Return the kind of a reference to a secret, and the name after the colon.

    Raises:
        UsageError: it is no reference. The message hides it: it may be the secret.
    """
    kind, _, named = reference.partition(":")
    if kind not in KINDS or not named:
        raise UsageError(
            f"The value of the secret {variable} is no reference. Write "
            f"{variable}=env:NAME, {variable}=file:PATH or {variable}=engine:NAME."
        )
    return kind, named


def in_engine(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets that the engine stores: its own name of each, by variable."""
    references = {
        name: check_reference(name, reference) for name, reference in secrets.items()
    }
    return {
        name: named for name, (kind, named) in references.items() if kind == "engine"
    }


def refuse_fields(spec: IslandSpec, refusals: Mapping[str, str]) -> None:
    """Refuse the fields of a spec that an engine cannot fulfil, if they are given.

    `refusals` has a message by field of a spec or of its resources. In a message {} is
    the field with its value.

    Raises:
        UsageError: one is given.
    """
    values = {**vars(spec), **vars(spec.resources)}
    for name, message in refusals.items():
        value = values[name]
        if value is not None and value != ():
            text = f"{value:g}" if isinstance(value, int | float) else repr(value)
            raise UsageError(message.format(f"{name}={text}"))


def refuse_stored_secrets(spec: IslandSpec, engine: str) -> None:
    """Refuse secrets that are to come from an engine that keeps none.

    Raises:
        UsageError: there is one.
    """
    for name in in_engine(spec.secrets):
        raise UsageError(
            f"The secret {name} is to come from the engine, and {engine} keeps none. "
            f"Give {name}=env:NAME or {name}=file:PATH."
        )


def resolve(
    secrets: Mapping[str, str], *, environment: Mapping[str, str]
) -> dict[str, Secret]:
    """Return the values of the secrets in the environment and in files.

    Raises:
        UsageError: a reference points to nothing.
    """
    values = {}
    for variable, reference in secrets.items():
        kind, named = check_reference(variable, reference)
        if kind == "env":
            values[variable] = _from_environment(variable, named, environment)
        elif kind == "file":
            data = read_private(
                Path(named), content="secret", max_bytes=MAX_SECRET_BYTES, is_given=True
            )
            values[variable] = _secret_text(variable, data)
    return values


def _from_environment(
    variable: str, named: str, environment: Mapping[str, str]
) -> Secret:
    if named not in environment:
        raise UsageError(
            f"The secret {variable} is to come from {named}, which is not set here. "
            f"Set it, or give {variable}=file:PATH."
        )
    return Secret(environment[named])


def _secret_text(variable: str, data: bytes) -> Secret:
    try:
        return Secret(data.decode().strip())
    except UnicodeDecodeError:
        raise UsageError(f"The file of the secret {variable} holds no text.") from None
