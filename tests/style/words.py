"""The words and phrases that the lint reports, each with a plain alternative.

No ordinary English or engineering word is forbidden as such: a name is reported only
if no part of it has content, and a phrase only if a shorter, literal one exists.
"""

from __future__ import annotations

import re
from typing import NamedTuple

CONTENTLESS = {
    "about": "subject, island or a noun",
    "all_of_it": "a noun",
    "also": "extra",
    "anything": "a noun",
    "asked": "request, requested_<noun>",
    "asking": "connection, request",
    "at": "position, offset, index, path or time",
    "brought": "received_<noun>",
    "came": "received_<noun>",
    "chance": "generator, probability",
    "each": "the noun: island, path, row",
    "everything": "a noun",
    "found": "the noun that was looked for: match, path, entry",
    "given": "argument, value or the noun",
    "going": "running_<noun>",
    "gone": "removed, closed_<noun>",
    "happening": "event",
    "heard": "message, received_<noun>",
    "held": "stored, held_<noun>",
    "here": "local, this_<noun>",
    "how": "mode, method, kind",
    "it": "the noun",
    "kept": "stored, retained_<noun>",
    "known": "cache, table, known_<noun>",
    "least": "min_<noun>",
    "left": "remaining_<noun>",
    "like": "template, reference",
    "lives": "incarnations",
    "life": "incarnation",
    "lot": "event_loop, batch",
    "made": "the noun that was created",
    "met": "error, encountered_<noun>",
    "mine": "own_<noun>",
    "more": "extra, has_more_<noun>",
    "most": "max_<noun>",
    "nothing": "EMPTY, a noun",
    "of": "total, source or a noun",
    "one": "the noun: island, path, row",
    "ones": "the noun",
    "ours": "own_<noun>",
    "own": "own_<noun>",
    "place": "path, host, slot, location, index",
    "places": "paths, hosts, slots",
    "right": "is_correct; right only beside left",
    "said": "reply, message, output",
    "saying": "message",
    "something": "a noun",
    "spot": "position, index",
    "spots": "positions",
    "such": "a noun",
    "surroundings": "environment",
    "takes": "a noun",
    "taken": "received, used_<noun>",
    "that": "the noun",
    "theirs": "remote_<noun>",
    "there": "remote, path, existing_<noun>",
    "these": "a noun in the plural",
    "thing": "a noun",
    "things": "a noun in the plural",
    "this": "the noun",
    "those": "a noun in the plural",
    "told": "message, notification",
    "unheard": "unacknowledged",
    "usual": "default",
    "way": "route, mode, method",
    "ways": "routes, modes",
    "what": "the noun",
    "which": "index, kind, selected_<noun>",
    "where": "path, location, position",
    "who": "island, member, owner, sender",
    "whole": "full_<noun>, complete",
    "whom": "recipient",
    "whose": "owner",
    "why": "reason",
    "word": "command, token, message",
    "words": "argv, arguments, message",
}
"""Words without content as names of variables, with names that have some."""

FILLERS = {"a", "all", "an", "and", "any", "as", "by", "for", "in", "is", "no", "not"}
FILLERS |= {"now", "on", "or", "so", "the", "to", "was"}
"""Words that add nothing to a name of contentless ones (`all_told`)."""

PREDICATES = ("is_", "has_", "was_", "are_", "can_", "may_", "must_")

GERUND = re.compile(r".+ing$")
PARTICIPLE = re.compile(r".+[^e]ed$")
IRREGULAR = {
    "begun",
    "bound",
    "brought",
    "built",
    "chosen",
    "come",
    "done",
    "drawn",
    "found",
    "given",
    "gone",
    "heard",
    "held",
    "kept",
    "known",
    "led",
    "left",
    "lost",
    "made",
    "met",
    "read",
    "said",
    "seen",
    "sent",
    "shown",
    "spent",
    "spoken",
    "taken",
    "told",
    "torn",
    "understood",
    "withdrawn",
    "written",
}
"""Participles that a suffix does not show."""

NOUNS = {
    "bed",
    "embedding",
    "encoding",
    "feed",
    "fencing",
    "heading",
    "lightning",
    "logging",
    "mapping",
    "padding",
    "ping",
    "pricing",
    "ring",
    "rounding",
    "routing",
    "scaling",
    "seed",
    "setting",
    "settings",
    "sharding",
    "speed",
    "spring",
    "string",
    "testing",
    "timing",
    "training",
    "warning",
}
"""Nouns that end like a gerund or a participle."""


def hint_of(name: str, *, is_pair: bool = False) -> str | None:
    """Return a hint if an assigned name says nothing, else None.

    `left` and `right` are fine where a function assigns both.
    """
    plain = name.strip("_").lower()
    if plain.startswith(PREDICATES) or (is_pair and plain in {"left", "right"}):
        return None
    if plain in CONTENTLESS:
        return CONTENTLESS[plain]
    parts = plain.split("_")
    if len(parts) > 1 and all(p in CONTENTLESS or p in FILLERS for p in parts):
        return next((CONTENTLESS[p] for p in parts if p in CONTENTLESS), None)
    return None


PARTICLES = {"ahead", "apart", "away", "back", "in", "off", "on", "out", "over", "up"}


def is_activity(module: str) -> bool:
    """Return whether a module is named by a gerund or a participle.

    A participle before a noun is fine (`sealed_update`); a gerund is not
    (`reading_updates`), nor a participle with a particle (`held_back`).
    """
    first, *others = module.strip("_").split("_")
    last = others[-1] if others else first
    return (
        _is_gerund(first)
        or _is_gerund(last)
        or _is_participle(last)
        or (_is_participle(first) and last in PARTICLES)
    )


def _is_gerund(term: str) -> bool:
    return term not in NOUNS and bool(GERUND.match(term))


def _is_participle(term: str) -> bool:
    return term not in NOUNS and (term in IRREGULAR or bool(PARTICIPLE.match(term)))


class Phrase(NamedTuple):
    """A roundabout phrase, with a plain alternative."""

    pattern: re.Pattern[str]
    hint: str


def _phrase(pattern: str, hint: str) -> Phrase:
    return Phrase(re.compile(pattern.replace(" ", r"\s+")), hint)


_BE = r"(?:is|are|was|were|be|been|being|am)"
_PREPOSITION = (
    r"(?:about|after|all|and|as|at|before|but|by|for|from|in|into|like|of|on|only|or"
    r"|than|to|with|without)"
)

PHRASES = [
    _phrase(r"\bWhat\b", "name the thing: a noun, then a verb"),
    _phrase(rf"\b{_PREPOSITION} what\b", "a noun instead of 'what ...'"),
    _phrase(
        r"\bwhat (?:is|are|was|were|has|have|had|may|must|can|cannot|could|should"
        r"|would|will|might|comes?|came|goes|went|stands?|lies|belongs|counts?"
        r"|remains|failed|waits?)\b",
        "a noun instead of 'what ...'",
    ),
    _phrase(
        r"\bwhat (?:it|they|an?|the|this|that|each|every|its|their|other|others"
        r"|islands?|ranks?|people|`[^`]*`)"
        r" (?:\w+ ){0,3}?"
        r"(?:is|are|was|were|has|have|had|holds?|says?|said|knows?|sends?|sent|gives?"
        r"|gave|takes?|took|makes?|made|keeps?|kept|wants?|asks?|asked|brings?|brought"
        r"|left|leaves?|told|tells?|writes?|wrote|reads?)\b",
        "a noun instead of 'what ...'",
    ),
    _phrase(r"\bWho\b", "name the actor: the island, the caller, you"),
    _phrase(rf"\b{_PREPOSITION} who\b", "name the actor: the island, the caller"),
    _phrase(
        r"(?:^|[;:|(] |\b(?:if|that|what|so|when|while|but) )who (?=\w)",
        "name the actor: the island, the caller",
    ),
    _phrase(r"\b[Ll]et who\b", "name the actor: the island, the caller"),
    _phrase(r"\b[Ww]h(?:o|om)ever\b", "name the actor: any island that ..."),
    _phrase(r"\b[Ww]hatever\b", "'any <noun>', 'regardless of <noun>'"),
    _phrase(r"\b[Nn]obody\b", "'no island', 'no caller', 'nothing'"),
    _phrase(r"\b[Ee]verybody\b", "'every island', 'all ranks'"),
    _phrase(r"\b[Ss]omebody\b", "'another process', 'a user'"),
    _phrase(r"\b[Aa]nybody\b", "'any client', 'any island'"),
    _phrase(rf"\b{_BE} told\b", "name the actor: 'X notifies Y', 'Y receives ...'"),
    _phrase(rf"\b{_BE} said\b", "'is reported', 'is sent', 'is documented'"),
    _phrase(rf"\b{_BE} had\b", "'is available', 'exists'"),
    _phrase(rf"\b{_BE} (?:heard|met|owed)\b", "'is received', 'is encountered'"),
    _phrase(rf"\b{_BE} asked\b", "'receives a request', 'is requested'"),
    _phrase(r"\b(?:has|have|had) (?:said|told|spoken)\b", "'has reported', 'has sent'"),
    _phrase(
        r"\b(?:tells?|telling|told) (?:people|who|what|them|it|others|the others)\b",
        "'notifies', 'reports <noun> to'",
    ),
    _phrase(
        r"\b(?:says?|saying|said) (?:so|what|who|whose|no more)\b",
        "'reports', 'states', 'contains <noun>'",
    ),
    _phrase(r"\b(?:hears?|heard) (?:of|from|no|nothing|it)\b", "'receives'"),
    _phrase(r"\b(?:go|goes|going|gone|went) on\b", "'continue', 'resume'"),
    _phrase(r"\b[Aa]new\b", "'again'"),
    _phrase(r"\b[Aa]t once\b", "'immediately', 'at the same time', 'in one call'"),
    _phrase(r"\bof (?:its|their|one's|his) own\b", "'its own <noun>', 'separate'"),
    _phrase(
        r"\bso (?:many|much|often|long)\b(?! (?:as|that))",
        "give the number its name: 'n seconds', 'at most `limit`'",
    ),
    _phrase(r"\bfor good\b", "'permanently'"),
    _phrase(r"\bfor ever\b", "'forever'"),
    _phrase(r"\bunder way\b", "'in progress', 'in flight'"),
    _phrase(r"\bon (?:its|their) way\b", "'in flight', 'being sent'"),
    _phrase(r"\bany more\b(?! than)", "'no longer'"),
    _phrase(r"\bno more(?=[.,;:)]|$)", "'no longer'"),
    _phrase(r"[,;] without(?=[.,;:)]|$)", "'by default', 'otherwise'"),
    _phrase(
        rf"\b{_BE} (?:not )?(?:there|here)\b(?! (?:a|an|no|any)\b)",
        "'exists', 'is present'",
    ),
    _phrase(
        r"\b(?:same|one|such a|this|every|a|large|all) things?\b",
        "name it: the file, the message",
    ),
    _phrase(
        r"\b(?:a|an|any|its|their|the|this|that|one|each|every|new|next|last|first"
        r"|earlier|previous|later|other|which|whose|of) life\b"
        r"|\b(?:its|their|two|of|earlier|later|all|other|new) lives\b",
        "'incarnation' of an island, 'lifetime' of an object",
    ),
    _phrase(
        r"\b(?:thence|whence|lest|thereof|wherein|therein|henceforth|whereupon)\b",
        "modern English",
    ),
    _phrase(r"\bbut for\b", "'except'"),
    _phrase(r"\bsave for\b", "'except'"),
    _phrase(r"\bin vain\b", "'without effect'"),
    _phrase(r"\b(?:spoken|speaks?|spoke) for\b", "'represents', 'signs for'"),
    _phrase(r"\b(?:the|a|last|its|next|first) word of\b", "'message', 'command'"),
    _phrase(r"\boperators?' words?\b|\boperator's words?\b", "'command'"),
    _phrase(r"\b(?:comes?|came) to nothing\b", "'fails', 'has no effect'"),
    _phrase(r"\bcome of it\b|\bcomes of it\b|\bbecame of\b", "'result of'"),
    _phrase(r"\bmakes? of (?:it|them|each)\b", "'derives from', 'returns for'"),
    _phrase(r"\bone's own\b", "'your', 'its'"),
    _phrase(
        r"\bas (?:it|they) (?:is|are|was|were|stands?|stood)\b(?=[,.;:)]|$| now)",
        "'unchanged'",
    ),
    _phrase(r"\bgoes? by\b", "'uses', 'is named'"),
    _phrase(r"\b(?:lies|lie|lay) (?:there|here)\b", "'is stored', 'is located'"),
    _phrase(r"\bonce and for all\b", "'once'"),
]
"""Roundabout phrases in prose."""
