"""The search of the built site, as a browser runs it: `site_search.py FOLDER QUERY ...`.

The theme's own search worker is run in V8 (mini-racer) over the site's own index.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Queries of readers, and the page that must come first.
WANTED = {
    "faster": "faster.html",
    "per-layer density": "budgets.html",
    "onnx": "exports.html",
    "openvino": "exports.html",
    "QAT": "exports.html",
    "quantize": "exports.html",
    "2:4": "structures.html",
    "prune_low_magnitude": "names.html",
    "l1_unstructured": "names.html",
    "PolynomialDecay": "names.html",
    "install": "index.html",
    "RigL": "dynamic_sparse_training.html",
    "CNN": "tutorials/cnn.html",
    "roadmap": "roadmap.html",
    "deprecation": "deprecation.html",
    "raspberry pi": "devices.html",
    "C array": "devices.html",
    "prune a trained model": "from_model_to_file.html",
    "custom training loop": "custom_loops.html",
    "singular values": "saliency_and_spectrum.html",
    "plot masks": "gallery.html",
    "save and load": "saving.html",
    "LSTM": "deployment.html",
    "KerasTuner": "works_with.html",
    "wandb": "works_with.html",
    "Hugging Face": "works_with.html",
    "hls4ml": "landscape.html",
    "not smaller": "faq.html",
}
# Files that belong to the site, and would bury its pages if they were searched.
SOURCES = ("examples/",)

# The globals of a worker in a browser, and the messages of the theme's page (its bundle.*.js).
_BROWSER = """
var sent = [], told = [], receive;
var self = globalThis;
globalThis.console = {log() {}, warn(...words) { told.push(words.map(String).join(" ")); }};
globalThis.addEventListener = (_, listener) => { receive = listener; };
globalThis.postMessage = message => { sent.push(message); };
"""
_FIELDS = {
    "title": {"boost": 1e3},
    "text": {"boost": 1},
    "tags": {"boost": 1e6},
}


class Search:
    """The search of the site in a folder."""

    def __init__(self, folder: Path):
        from py_mini_racer import MiniRacer

        self._engine = MiniRacer()
        (worker,) = (folder / "assets" / "javascripts" / "workers").glob(
            "search.*.min.js"
        )
        self._engine.eval(_BROWSER + worker.read_text(encoding="utf-8"))
        index = json.loads(
            (folder / "search" / "search_index.json").read_text(
                encoding="utf-8"
            )
        )
        self.indexed = [entry["location"] for entry in index["docs"]]
        index["config"].setdefault("fields", _FIELDS)
        self._ask(0, {**index, "options": {"suggest": False}})

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()  # its thread would keep Python from ending

    def _ask(self, kind: int, data: Any) -> Any:
        message = json.dumps({"data": {"type": kind, "data": data}})
        self._engine.eval(f"sent.length = told.length = 0; receive({message})")
        sent, told = json.loads(
            self._engine.eval("JSON.stringify([sent, told])")
        )
        if told or len(sent) != 1:
            raise ValueError(
                f"The search answered {len(sent)} times to {data!r:.80}: {told}"
            )
        return sent[0].get("data")

    def __call__(self, query: str) -> list[str]:
        """The pages that a query finds, the first one first."""
        return [
            found[0]["location"].split("#")[0]
            for found in self._ask(2, query)["items"]
        ]


def lost(folder: Path) -> list[str]:
    """Queries of `WANTED` that do not end on their page first, and sources that are searched."""
    with Search(folder) as search:
        wrong = [
            f"{page} can be found"
            for page in search.indexed
            if page.startswith(SOURCES)
        ]
        for query, page in WANTED.items():
            for end in range(1, len(query)):
                # While it is typed: no query may be an error.
                search(query[:end])
            if (found := search(query))[:1] != [page]:
                wrong.append(
                    f"a search for {query!r} finds {found[:3]}, not {page} first"
                )
    return wrong


if __name__ == "__main__":
    with Search(Path(sys.argv[1])) as search:
        for query in sys.argv[2:]:
            print(f"{query}:", *search(query)[:5])
