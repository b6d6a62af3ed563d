"""The list of a run's constants, as a coordinator tells it: which it has, which not."""

from __future__ import annotations

from atoll.exchange.forms.fields import Field, listed, table, text
from atoll.exchange.forms.messages import MAX_TENSORS, TENSOR
from atoll.exchange.forms.replies import Answer, json_answer
from atoll.exchange.forms.text import MAX_LARGE_BYTES, load
from atoll.protocol.constants import Catalogue
from atoll.wire.digests import Bytes

DIGESTS: Field[tuple[str, ...]] = listed(text(128), most=MAX_TENSORS)
CATALOGUE: Field[Catalogue] = table(
    Catalogue, {"constants": listed(TENSOR, most=MAX_TENSORS), "kept": DIGESTS}
)


def catalogue_parts(catalogue: Catalogue) -> Answer:
    """Return the answer that lists constants."""
    return json_answer(CATALOGUE.write(catalogue), what="constants")


def parse_catalogue(data: Bytes) -> Catalogue:
    """Return the list that a coordinator has told.

    Raises:
        UsageError: it is none.
    """
    return CATALOGUE.read(load(data, what="constants", most=MAX_LARGE_BYTES), "answer")
