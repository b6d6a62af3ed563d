"""`atoll plan`: how busy devices are on a link, and which settings keep them so."""

from __future__ import annotations

import json
import math
import re
import tomllib
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.run_file import print_warnings, settings_of
from atoll.cli.run_names import complete_run_name, open_named
from atoll.errors import UsageError
from atoll.island.environment import credentials_from_environment
from atoll.safetensors import read_file_header
from atoll.settings import MAX_RUN_FILE_BYTES, RunSettings, WireSection

if TYPE_CHECKING:  # slow to import
    from atoll.plan import (
        Comparison,
        ExchangeKind,
        IslandLink,
        PlanReport,
        Prices,
        Workload,
    )

ISLANDS, MAX_ISLANDS, MAX_SYNC_EVERY = 4, 65_536, 1_000_000
PRICES = "prices.toml"
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
TIME_SCALES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}
NUMBER = r"(\d+(?:\.\d*)?|\.\d+)\s*"


def count(text: str) -> float:
    """Return a number with a prefix: 1B, 350M, 0.5M, 1e9."""
    match = re.fullmatch(NUMBER + r"([kKMGBT]?)", text.strip())
    if match and float(match[1]) > 0:
        return float(match[1]) * SCALES[match[2]]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{text!r} is no number. Write 1B, 350M or 124000000.")
    return value


def rate(text: str) -> float:
    """Return a rate in bits per second: 100Mbit, 2.5Gbit/s."""
    text = text.strip()
    match = re.fullmatch(NUMBER + r"([kKMGT]?)bit(?:/s|ps)?", text)
    if match and float(match[1]) > 0:
        return float(match[1]) * SCALES[match[2]]
    bytes_per_s = re.fullmatch(NUMBER + r"([kKMGT]?)B(?:ytes?)?(?:/s|ps)?", text)
    if bytes_per_s:
        bits = f"{8 * float(bytes_per_s[1]):g}{bytes_per_s[2]}bit"
        raise typer.BadParameter(f"{text!r} counts bytes. Links count bits: {bits}.")
    raise typer.BadParameter(f"{text!r} is no rate. Write 100Mbit or 2.5Gbit.")


def span(text: str) -> float:
    """Return seconds: 40ms, 1.5s, 2min."""
    match = re.fullmatch(NUMBER + r"(us|ms|s|min|h|)", text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is no time. Write 40ms, 1.5s or 2min.")
    return float(match[1]) * TIME_SCALES[match[2]]


def share(text: str) -> float:
    """Return a share: 97% or 0.97."""
    match = re.fullmatch(NUMBER + r"(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0 < value < 1:
        raise typer.BadParameter(
            f"{text!r} must be a share between 0 and 1. Write 97% or 0.97."
        )
    return value


def _parsed(parser: Any, metavar: str, help_text: str, *names: str) -> Any:
    return typer.Option(
        *names, parser=parser, metavar=metavar, help=help_text, show_default=False
    )


RunOrFile = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN.toml|RUN",
        help="A run file to judge, or a run to measure: URL, directory or name.",
        autocompletion=complete_run_name,
        show_default=False,
    ),
]
Params = Annotated[
    str | None, typer.Option(help="Parameters, as 1B or 350M, or a safetensors file.")
]
LinkRate = Annotated[
    float | None, _parsed(rate, "RATE", "Rate of an island's link, as 100Mbit.")
]
UpRate = Annotated[float | None, _parsed(rate, "RATE", "Its rate up.")]
DownRate = Annotated[float | None, _parsed(rate, "RATE", "Its rate down.")]
Delay = Annotated[
    float | None, _parsed(span, "TIME", "Delay of the link one way, as 40ms.")
]
Step = Annotated[float | None, _parsed(span, "TIME", "Time of an inner step, as 1.2s.")]
Steps = Annotated[
    str | None,
    typer.Option(metavar="TIME,...", help="The same for each of unequal islands."),
]
Islands = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_ISLANDS, help=f"Islands. Default: {ISLANDS}."),
]
Target = Annotated[
    float | None, _parsed(share, "SHARE", "Share of time to compute. Default: 97%.")
]
Wire = Annotated[
    str | None,
    typer.Option(metavar="UP/DOWN", help="Codecs to plan with, as e3m0/int8."),
]
MaxSyncEvery = Annotated[
    int, typer.Option(min=1, max=MAX_SYNC_EVERY, help="Longest interval to plan with.")
]
Fragments = Annotated[
    int, typer.Option(min=1, max=32, help="Most fragments, if --params is no file.")
]
IsShared = Annotated[
    bool, typer.Option("--shared", help="Both directions share one medium.")
]
CoordinatorRate = Annotated[
    float | None, _parsed(rate, "RATE", "Rate of the coordinator's link, each way.")
]
InStore = Annotated[
    bool, typer.Option("--store", help="Plan for a bucket, not a coordinator.")
]
RequestTime = Annotated[
    float | None, _parsed(span, "TIME", "Time of a request to the bucket: 30ms.")
]
InCollective = Annotated[
    bool, typer.Option("--collective", help="Plan for a collective of islands.")
]
StepTokens = Annotated[
    float | None,
    _parsed(count, "N", "Tokens of an island's inner step.", "--tokens-per-step"),
]
EndTokens = Annotated[
    float | None, _parsed(count, "N", "Tokens of the whole run, as 20B.")
]
UsdPerHour = Annotated[
    float | None, typer.Option(min=0.0, help="Price of an island's hour.")
]
UsdPerGb = Annotated[
    float | None, typer.Option(min=0.0, help="Price of a GB, up and down.")
]
IsTable4 = Annotated[
    bool, typer.Option("--table4", help="Print table 4 of Streaming DiLoCo, rebuilt.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(
    run: RunOrFile = None,
    params: Params = None,
    link: LinkRate = None,
    up: UpRate = None,
    down: DownRate = None,
    delay: Delay = None,
    step: Step = None,
    steps: Steps = None,
    islands: Islands = None,
    target: Target = None,
    wire: Wire = None,
    max_sync_every: MaxSyncEvery = 1000,
    fragments: Fragments = 8,
    is_shared: IsShared = False,
    coordinator_link: CoordinatorRate = None,
    store: InStore = False,
    request: RequestTime = None,
    collective: InCollective = False,
    step_tokens: StepTokens = None,
    end_tokens: EndTokens = None,
    usd_per_hour: UsdPerHour = None,
    usd_per_gb: UsdPerGb = None,
    is_table_4: IsTable4 = False,
    as_json: AsJson = False,
) -> None:
    """Plan a run for a link: which settings keep devices busy.

    With a run file, judges its settings too. With a run, compares its measured
    utilisation with the model and shows other settings; where the two differ by more
    than 5 points there is no advice. Prices come from --usd-per-hour and --usd-per-gb,
    or from prices.toml beside the user's credentials.
    """
    from atoll.plan import ExchangeKind, table_4_lines

    if is_table_4:
        typer.echo("\n".join(table_4_lines()))
        return
    if store and collective:
        raise UsageError("--store and --collective exclude each other. Choose one.")
    its_link = _Rates(link, up, down, delay, coordinator_link, request).link(
        is_shared=is_shared
    )
    if run is not None and not run.endswith(".toml"):
        parameters = None if params is None else _model(params)[0]
        _print(_measured(run, its_link, parameters), as_json=as_json)
        return
    kind = ExchangeKind.COLLECTIVE if collective else ExchangeKind.COORDINATOR
    inputs = _Inputs(
        params=params,
        steps_s=_steps(step, steps),
        islands=islands,
        max_fragments=fragments,
        kind=ExchangeKind.STORE if store else kind,
    )
    report = _report(
        inputs, its_link, run, target=target, wire=wire, max_sync_every=max_sync_every
    )
    prices = _prices(usd_per_hour, usd_per_gb)
    if prices is not None and step_tokens is not None and end_tokens is not None:
        report = _with_costs(report, prices, step_tokens, end_tokens)
    elif usd_per_hour is not None or usd_per_gb is not None:
        raise UsageError("Prices need --tokens-per-step and --end-tokens too.")
    _print(report, as_json=as_json)


@dataclass(frozen=True)
class _Rates:
    """The options about a link."""

    both: float | None
    up: float | None
    down: float | None
    delay_s: float | None
    coordinator: float | None
    request_s: float | None

    def link(self, *, is_shared: bool) -> IslandLink:
        """Return the link.

        Raises:
            UsageError: a rate or the delay is missing.
        """
        from atoll.plan import IslandLink

        up, down = self.up or self.both, self.down or self.both
        if up is None or down is None or self.delay_s is None:
            raise UsageError(
                "A plan needs the rate of an island's link, --link 100Mbit or --up and "
                "--down, and its delay one way, --delay 40ms. `atoll doctor RUN` "
                "measures the rate up and the round trip, which is twice the delay."
            )
        link = IslandLink(
            up_bits_per_s=up,
            down_bits_per_s=down,
            delay_s=self.delay_s,
            is_shared=is_shared,
            coordinator_bits_per_s=self.coordinator or math.inf,
        )
        if self.request_s is None:
            return link
        return replace(link, request_s=self.request_s)


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """The options about model and islands."""

    params: str | None
    steps_s: tuple[float, ...]
    islands: int | None
    max_fragments: int
    kind: ExchangeKind

    def workload(self, settings: RunSettings | None) -> Workload:
        """Return the workload; a run file has the default number of islands."""
        from atoll.plan import Workload

        if self.params is None or not self.steps_s:
            raise UsageError(
                "A plan needs --params and --step as well, as in `atoll plan --params "
                "1B --link 100Mbit --delay 40ms --step 1s`; or a run that is trained: "
                "`atoll plan RUN --link 100Mbit --delay 40ms`."
            )
        if len(self.steps_s) > 1 and self.islands not in (None, len(self.steps_s)):
            raise UsageError(
                f"--steps has {len(self.steps_s)} islands, and --islands is "
                f"{self.islands}. Leave out --islands."
            )
        count = self.islands or ISLANDS
        if self.islands is None and settings is not None:
            count = max(2, settings.run.start_islands)
        parameters, tensors = _model(self.params)
        return Workload(
            parameters=parameters,
            tensors=tensors,
            steps_s=self.steps_s if len(self.steps_s) > 1 else self.steps_s * count,
            max_fragments=self.max_fragments,
            is_dynamic=settings is not None and settings.sync.dynamic_local_updates,
            kind=self.kind,
        )


def _steps(step_s: float | None, steps: str | None) -> tuple[float, ...]:
    if steps is not None:
        return tuple(span(text) for text in steps.split(","))
    return () if step_s is None else (step_s,)


def _model(params: str) -> tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return the number of parameters; of a file, names and shapes as well."""
    path = Path(params)
    if not path.is_file():
        return round(count(params)), ()
    with path.open("rb") as opened:
        header = read_file_header(opened, source=params)
    tensors = tuple(
        (name, entry.shape)
        for name, entry in header.arrays.items()
        if entry.kind in FLOATS
    )
    if not tensors:
        raise UsageError(f"{params} has no tensor of floating point numbers.")
    return sum(math.prod(shape) for _, shape in tensors), tensors


def _report(
    inputs: _Inputs,
    link: IslandLink,
    run_file: str | None,
    *,
    target: float | None,
    wire: str | None,
    max_sync_every: int,
) -> PlanReport:
    from atoll.plan import Plan, PlanReport, advise
    from atoll.plan.search import TARGET, WIRES

    target = target or TARGET
    settings = None if run_file is None else settings_of(Path(run_file), None)
    workload = inputs.workload(settings)
    rows = advise(
        workload,
        link,
        wires=WIRES if wire is None else (_wire(wire),),
        target=target,
        max_sync_every=max_sync_every,
    )
    judged = None
    if run_file is not None and settings is not None:
        judged = (Path(run_file).name, Plan.of(settings))
    return PlanReport(
        workload=workload,
        link=link,
        target=target,
        rows=rows,
        judged=judged,
    )


def _wire(text: str) -> tuple[str, str]:
    """Return codecs up and down, judged as a run file's."""
    up, _, down = text.partition("/")
    with print_warnings():
        section = WireSection(up=up, down=down or up)
    return section.up, section.down


def _prices(usd_per_hour: float | None, usd_per_gb: float | None) -> Prices | None:
    """Return the prices of the options, else those of the user's file, if any."""
    from atoll.plan import Prices

    if usd_per_hour is not None or usd_per_gb is not None:
        usd = usd_per_gb or 0.0
        hours = {"*": usd_per_hour or 0.0}
        return Prices(island_hours=hours, up_gb=usd, down_gb=usd)
    path = credentials_from_environment().credentials.parent / PRICES
    if not path.is_file():
        return None
    with path.open("rb") as opened:
        text = opened.read(MAX_RUN_FILE_BYTES + 1)
    if len(text) > MAX_RUN_FILE_BYTES:
        raise UsageError(f"{path} exceeds {MAX_RUN_FILE_BYTES} bytes.")
    try:
        return Prices.of(tomllib.loads(text.decode()), source=str(path))
    except ValueError as exc:
        raise UsageError(f"{path} is no TOML file: {exc}.") from exc


def _with_costs(
    report: PlanReport, prices: Prices, step_tokens: float, end_tokens: float
) -> PlanReport:
    from atoll.plan import cost_of

    names = [f"island-{number + 1}" for number in range(report.workload.islands)]
    costs = [
        cost_of(
            report.workload,
            row.plan,
            row.prediction,
            prices,
            islands=names,
            step_tokens=step_tokens,
            end_tokens=end_tokens,
        )
        for row in report.rows
    ]
    return replace(report, costs=costs)


def _measured(run: str, link: IslandLink, parameters: int | None) -> Comparison:
    """Return a run's measured utilisation beside the model."""
    from atoll.plan import ExchangeKind, MeasuredRun, compare

    with closing(open_named(run)) as client:
        status, settings = client.status(watch=True), client.settings()
        try:
            columns = "seconds,wait_s,inner_steps"
            history = client.history(parts="curves,rounds", columns=columns)
        except UsageError:  # a run in a store
            history = {}
    is_store = "watched_s" in status.document
    measured = MeasuredRun.of(
        status.document,
        settings,
        kind=ExchangeKind.STORE if is_store else ExchangeKind.COORDINATOR,
        history=history,
        parameters=parameters,
    )
    return compare(measured, link)


def _print(result: PlanReport | Comparison, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.document(), indent=2))
    else:
        typer.echo("\n".join(result.lines()))
