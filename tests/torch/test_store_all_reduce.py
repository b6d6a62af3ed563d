"""Tensors of ranks that share only a bucket become their mean, in place."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from atoll.errors import Unreachable, UsageError
from atoll.store import MemoryStore, Store
from atoll.torch import StoreAllReduce
from tests.store.buckets import s3_store, seaweedfs

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Store]]:
    """What opens stores of one part of a bucket of SeaweedFS."""
    with seaweedfs(tmp_path_factory.mktemp("s3") / "home") as where:
        yield lambda: s3_store(where, prefix="all-reduce")


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, generator=generator)


def on_all(world_size: int, act: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Call `act` for every rank at once, and return what each returned."""
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(act, range(world_size)))


def same_bits(tensors: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(each.view(torch.uint8), tensors[0].view(torch.uint8))
        for each in tensors
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_gets_the_same_bits(world_size: int, dtype: torch.dtype) -> None:
    """The mean in the tensor's own precision, in place and returned."""
    store = MemoryStore()

    def act(rank: int) -> torch.Tensor:
        mine = of_rank(rank, 5, 7).to(dtype)
        found = StoreAllReduce(store, rank, world_size, timeout_s=60.0)(mine)
        assert found is mine
        return mine

    found = on_all(world_size, act)
    assert same_bits(found)
    exact = torch.stack(
        [of_rank(r, 5, 7).to(dtype).double() for r in range(world_size)]
    )
    error = torch.finfo(dtype).eps * 2
    torch.testing.assert_close(found[0].double(), exact.mean(0), atol=error, rtol=error)


def test_several_tensors_go_in_one_round() -> None:
    """Of different kinds and shapes, parameters and parts of others too."""
    store = MemoryStore()

    def act(rank: int) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.full((2, 3), float(rank)))
        narrow = torch.full((3,), float(rank), dtype=torch.bfloat16)
        columns = torch.full((4, 4), float(rank)).T[:, 1:3]  # not contiguous
        wide = torch.tensor(float(rank), dtype=torch.float64)
        reduce = StoreAllReduce(store, rank, 2, timeout_s=60.0)
        found = reduce(narrow, weight, wide, columns)
        assert isinstance(found, tuple)
        assert [id(each) for each in found] == [
            id(each) for each in (narrow, weight, wide, columns)
        ]
        assert reduce.round == 1
        # The mean of 0 and 1.
        assert all(bool((each == 0.5).all()) for each in found)
        return weight.detach()

    assert same_bits(on_all(2, act))


def test_names_have_rounds_of_their_own() -> None:
    """As `allreduce` takes them."""
    store = MemoryStore()

    def act(rank: int) -> torch.Tensor:
        reduce = StoreAllReduce(store, rank, 2, timeout_s=60.0)
        first = reduce.allreduce(torch.full((2,), float(rank)), "loss", op="sum")
        second = reduce.allreduce(torch.full((2,), 10.0 * rank))
        assert reduce.round == 1
        return first + second  # 1 and 5

    assert on_all(2, act)[1].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_bucket_of_s3_is_enough(bucket: Callable[[], Store], world_size: int) -> None:
    """Three rounds over a real S3, by ranges, with the requests that it takes."""
    size = 5 * 2**18  # five pieces

    def act(rank: int) -> torch.Tensor:
        name = f"ranks-{world_size}"
        reduce = StoreAllReduce(bucket(), rank, world_size, name=name, timeout_s=60.0)
        mine = of_rank(rank, size)
        for _ in range(3):
            reduce(mine)
        assert reduce.requests.bytes_up >= 3 * 4 * size
        assert 0 < reduce.requests.usd < 0.01
        reduce.close()
        return mine

    assert same_bits(on_all(world_size, act))


def test_an_absent_rank_is_named_and_the_tensor_stays(tmp_path: Path) -> None:
    """With the path of what is missing; calling again goes on."""
    hasty = StoreAllReduce(tmp_path, rank=0, world_size=2, name="x", timeout_s=0.1)
    mine = torch.ones(3)
    with pytest.raises(Unreachable, match=rf"rank 1 \({tmp_path}/x/up/0+\.00001\)"):
        hasty(mine)
    assert mine.tolist() == [1.0] * 3

    other = StoreAllReduce(tmp_path, rank=1, world_size=2, name="x", timeout_s=60.0)
    thread = threading.Thread(target=other, args=(torch.zeros(3),))
    thread.start()
    while hasty.round == 0:
        try:
            hasty(mine)
        except Unreachable:
            continue
    thread.join(timeout=60)
    assert mine.tolist() == [0.5] * 3


CHILD = """
import os, signal, sys, torch
from atoll.torch.store_all_reduce import StoreAllReduce
rank, dies_in, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
reduce = StoreAllReduce(place, rank=rank, world_size=2, timeout_s=120.0)
while reduce.round < 3:
    tensor = torch.full((4,), float(10 * reduce.round + rank))
    if reduce.round == dies_in:
        os.kill(os.getpid(), signal.SIGKILL)
    print(reduce.round, reduce(tensor).tolist(), flush=True)
"""


def test_a_process_that_is_killed_and_started_again_goes_on(tmp_path: Path) -> None:
    """It finds in the store that it has done one round."""

    def child(rank: int, dies_in: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", CHILD, str(rank), str(dies_in), str(tmp_path)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    with child(0, -1) as stays:
        with child(1, 1) as dies:
            assert dies.communicate(timeout=120)[0] == "0 [0.5, 0.5, 0.5, 0.5]\n"
        with child(1, -1) as again:
            told = again.communicate(timeout=120)[0]
        kept = stays.communicate(timeout=120)[0]
    # The means of 10 and 11, and of 20 and 21.
    assert told == "1 [10.5, 10.5, 10.5, 10.5]\n2 [20.5, 20.5, 20.5, 20.5]\n"
    assert kept == "0 [0.5, 0.5, 0.5, 0.5]\n" + told


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(2, dtype=torch.int64), r"Tensor 1 .* dtype is torch.int64. Known"),
        (torch.zeros(2, dtype=torch.complex64), r"dtype is torch.complex64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), r"dtype is torch.float8_e4m3fn"),
        (torch.zeros(2, device="meta"), r"it is on meta. Copy it to the CPU first"),
        (torch.zeros(1).expand(3), r"several of its values are one .* Clone it"),
        (torch.zeros(2, 2).to_sparse(), r"layout is torch.sparse_coo. Make it dense"),
        ([1.0], r"it is a list. Give plain tensors"),
    ],
    ids=["int", "complex", "float8", "meta", "expanded", "sparse", "list"],
)
def test_what_cannot_be_reduced_is_refused_by_name(
    tensor: torch.Tensor, said: str
) -> None:
    """Before anything is sent."""
    store = MemoryStore()
    reduce = StoreAllReduce(store, 0, 2, timeout_s=60.0)
    with pytest.raises(UsageError, match=said):
        reduce(torch.zeros(2), tensor)
    assert store.items("default/up/") == []


def test_nothing_is_nothing_to_reduce() -> None:
    """Neither no tensor nor empty ones."""
    reduce = StoreAllReduce(MemoryStore(), 0, 2, timeout_s=60.0)
    for tensors in ((), (torch.zeros(0), torch.zeros(3, 0))):
        with pytest.raises(UsageError, match=r"0 bytes cannot be reduced"):
            reduce(*tensors)


def test_shapes_must_be_the_same_on_every_rank() -> None:
    """Equal numbers of values are not enough."""
    store = MemoryStore()
    hasty = StoreAllReduce(store, 1, 2, timeout_s=0.01)
    with pytest.raises(Unreachable):
        hasty(torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"Rank 1 reduces something else in round 0"):
        StoreAllReduce(store, 0, 2, timeout_s=60.0)(torch.zeros(3, 2))


def test_the_signature_is_what_was_promised() -> None:
    """A change of it is a change of a promise."""
    words = list(inspect.signature(StoreAllReduce).parameters)
    assert words == ["url", "rank", "world_size", "name", "timeout_s", "start_round"]
    assert list(inspect.signature(StoreAllReduce.allreduce).parameters) == [
        "self",
        "tensor",
        "name",
        "op",
    ]


def test_who_keeps_the_round_starts_from_its_own_checkpoint() -> None:
    """The last mean comes again, if that is what the checkpoint was before."""
    store = MemoryStore()
    on_all(2, partial(_once, store))
    again = StoreAllReduce(store, 1, 2, timeout_s=60.0, start_round=0)
    assert again(torch.full((2,), 99.0)).tolist() == [0.5, 0.5]  # type: ignore[union-attr]  # one tensor


def test_the_example_of_the_document_runs() -> None:
    """Each rank prints the same, and the document shows what it runs."""
    example = ROOT / "examples" / "store_all_reduce.py"
    text = (ROOT / "docs" / "store-all-reduce.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert code in example.read_text()

    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, check=True
    )
    # 0, 1, 2 become 0, 2, 4 and their mean 2; then each round adds 0, 1, 2: 3, and 4.
    said = "[4.0, 4.0, 4.0, 4.0]"
    assert sorted(done.stdout.splitlines()) == [f"{rank} {said}" for rank in range(3)]


def _once(store: Store, rank: int) -> torch.Tensor:
    mine = torch.full((2,), float(rank))
    return StoreAllReduce(store, rank, 2, timeout_s=60.0).allreduce(mine)
