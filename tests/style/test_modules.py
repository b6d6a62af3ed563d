"""Modules are nouns, belong together, and do not spend their lines on imports."""

from __future__ import annotations

from tests.style.ratchet import (
    OWN_MODULES,
    differences,
    import_percent,
    recorded_percent,
)
from tests.style.tree import is_entry_point, is_interface, single_importers
from tests.style.words import is_activity

MAX_IMPORT_PERCENT = 9


def test_modules_are_nouns() -> None:
    """No module is newly named by a gerund or a participle; old ones leave the list."""
    assert differences("activities") == []


def test_gerunds_and_participles_are_told_from_nouns() -> None:
    """A suffix or a list decides, and nouns that look alike are excepted."""
    activities = ["leading", "gathered", "brought", "reading_updates", "held_back"]
    nouns = ["event_loop", "routing", "seed", "known_members", "settings", "feed"]

    assert [name for name in activities if not is_activity(name)] == []
    assert [name for name in nouns if is_activity(name)] == []


def test_a_module_with_one_importer_belongs_to_it() -> None:
    """Merge such a module into its importer, or list it with its reason."""
    assert differences("single_importers") == []


def test_interfaces_and_programs_may_have_one_importer() -> None:
    """A listener that one package uses, a verb and a script stay; a helper does not."""
    assert is_interface("atoll.http.listener", "atoll.coordinator.app")
    assert not is_interface("atoll.http.listener", "atoll.http.caller")
    assert is_interface("atoll.torch.join", "atoll.torch")
    assert is_entry_point("atoll.cli.serve")
    assert is_entry_point("atoll.launch.bootstrap")
    assert not is_entry_point("atoll.launch.spec")


def test_modules_with_a_reason_have_one_importer() -> None:
    """A module is listed with a reason only while it has exactly one importer."""
    assert [name for name in OWN_MODULES if name not in single_importers()] == []


def test_import_lines_are_a_small_share_of_code() -> None:
    """Import lines are at most 9 % of code; until then their share only falls."""
    assert import_percent() <= max(MAX_IMPORT_PERCENT, recorded_percent())
