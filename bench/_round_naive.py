"""The naive scheme of `round.py`: whole models by `torch.save` over `http.server`.

    _round_naive.py hub ISLANDS
    _round_naive.py island PORT ELEMENTS

Each island posts its weights; when all are there the hub answers with their average.
"""

from __future__ import annotations

import io
import sys
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from _round_crew import attend

Weights = dict[str, torch.Tensor]


def main() -> None:
    """Be what the first argument says."""
    torch.set_num_threads(1)
    what, *rest = sys.argv[1:]
    roles: dict[str, Callable[..., None]] = {"hub": serve, "island": take_part}
    roles[what](*rest)


def packed(weights: Weights) -> bytes:
    """Return weights as a file."""
    file = io.BytesIO()
    torch.save(weights, file)
    return file.getvalue()


def unpacked(data: bytes) -> Weights:
    """Return the weights that a file holds."""
    weights: Weights = torch.load(io.BytesIO(data))
    return weights


class Meeting:
    """Keeps everybody until all have come, and gives all the same answer."""

    def __init__(self, islands: int) -> None:
        self._brought: list[Weights] = []
        self._answer = b""
        self._all_here = threading.Barrier(islands, action=self._average)
        self._lock = threading.Lock()

    def bring(self, weights: Weights) -> bytes:
        """Return the average, once all have brought theirs."""
        with self._lock:
            self._brought.append(weights)
        self._all_here.wait()
        return self._answer

    def _average(self) -> None:
        brought, self._brought = self._brought, []
        self._answer = packed(
            {
                name: sum(each[name] for each in brought) / len(brought)  # type: ignore[misc]
                for name in brought[0]
            }
        )


def serve(islands: str) -> None:
    """Answer posts until the end."""
    meeting = Meeting(int(islands))

    class Requests(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            answer = meeting.bring(unpacked(data))
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *said: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    attend({}, port=listener.server_address[1])


def take_part(port: str, elements: str) -> None:
    """Post the weights, and load what comes back."""
    model = torch.nn.ParameterList([torch.randn(int(elements))])
    model.requires_grad_(requires_grad=False)

    def train() -> None:
        model[0].mul_(0.999)

    def make_round() -> None:
        data = packed(model.state_dict())
        url = f"http://127.0.0.1:{port}/"
        with urllib.request.urlopen(urllib.request.Request(url, data)) as reply:
            model.load_state_dict(unpacked(reply.read()))

    attend({"train": train, "round": make_round})


if __name__ == "__main__":
    main()
