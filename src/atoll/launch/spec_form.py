"""A spec as JSON, so that more islands of the same kind can be launched later."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from atoll.errors import CorruptError, UsageError
from atoll.launch.spec import IslandSpec, Resources, Restarts


def spec_to_form(spec: IslandSpec) -> dict[str, Any]:
    """Return a spec as what JSON knows. It holds references, and no secret."""
    return asdict(spec)


def spec_from_form(form: Any) -> IslandSpec:
    """Return the spec that was written.

    Raises:
        CorruptError: it is none.
    """
    try:
        given = {each.name: form[each.name] for each in fields(IslandSpec)}
        given |= {
            "command": tuple(map(_text, given["command"])),
            "requirements": tuple(map(_text, given["requirements"])),
            "environment": _texts(given["environment"]),
            "secrets": _texts(given["secrets"]),
            "resources": Resources(**given["resources"]),
            "restarts": Restarts(**given["restarts"]),
        }
        return IslandSpec(**given)
    except (LookupError, TypeError, ValueError, AttributeError, UsageError) as exc:
        raise CorruptError(f"That is no spec of an island: {exc}.") from exc


def _texts(form: Any) -> dict[str, str]:
    return {_text(key): _text(value) for key, value in form.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text")
    return value
