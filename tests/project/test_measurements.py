"""What was measured on a GPU and is kept: it says what the layer promises of itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "measurements"
PRODUCTS = FOLDER / "h200_products.json"
RECORDS = sorted(path for path in FOLDER.glob("*.json") if path != PRODUCTS)
RATE = 0.7
"""Of DeepGEMM's rate, by the layer's Triton product, with 64 to 4096 rows."""
QUANTISED = 2.0
"""Microseconds more on the device than FlashInfer below 32 rows, for a quantiser that loses no group."""
OVERHEAD = {"layer": 8.0, "operator": 10.0, "kept plan": 5.0}
"""Microseconds a call over the bare library, by the way of the call."""
LINEAR = 1.02
"""Times the bare sequence of library calls, eagerly and replayed."""
COPY = 0.6
"""Of the bandwidth of a copy, by the 1x128 quantiser."""
SIGNIFICAND = "div.approx depends on the significand alone"
"""The one question whose answer is no."""


def broken(made: dict[str, Any]) -> list[str]:
    """The promises that a record does not bear out."""
    times, checks, found = made["timings"], made["checks"], []
    found += [f"attempt {name}" for name, attempt in made["attempts"].items() if attempt["status"] != "ok"]
    found += [f"check {name}" for name, value in checks.items() if value is False and name != SIGNIFICAND]
    bare = {
        "host_us.fp8_gemm_nt": "bare",
        "host_us.switch M=16": "bare FlashInfer",
        "host_us.switch M=64": "bare vLLM quantiser and DeepGEMM",
    }
    for name, other in bare.items():
        for mine, most in OVERHEAD.items():
            if times[name].get(mine, 0.0) - times[name][other] >= most:
                found.append(f"{name}: {mine}")
    linear = [name for name in times if ".linear " in name]
    found += [name for name in linear if times[name]["layer"] > LINEAR * times[name]["bare"]]
    if len(linear) < 8:
        found.append("linear: four numbers of rows, eager and replayed")
    rates = times["quantiser_gb_per_s"]
    for mine, theirs in (("layer row-major", "vllm row-major"), ("layer TMA-aligned", "vllm column-major")):
        if rates[mine] < COPY * rates["copy of the same bytes"] or rates[mine] < rates[theirs]:
            found.append(f"quantiser: {mine}")
    wrong = {name.partition(", ")[2]: n for name, n in checks.items() if name.startswith("threads: ")}
    found += [f"threads: {name}" for name, n in wrong.items() if name.startswith("layer") and n != 0]
    if not wrong.get("FlashInfer"):
        found.append("threads: the race was not seen, so its absence says nothing")
    return found


def broken_products(made: dict[str, Any]) -> list[str]:
    """The promises of the layer's own product, and below 32 rows, that a record does not bear out."""
    times, found = made["timings"], [name for name, value in made["checks"].items() if value is not True]
    found += [f"attempt {name}" for name, attempt in made["attempts"].items() if attempt["status"] != "ok"]
    products = {name: t for name, t in times.items() if name.startswith("device_us.product M=")}
    if [name.split()[1] for name in products] != [f"M={m}" for m in (64, 128, 256, 512, 1024, 2048, 4096)]:
        found.append("products: seven numbers of rows")
    for name, t in times.items():
        if name.startswith("device_us."):
            found += [f"{name}: DeepGEMM"] if t["bare DeepGEMM"] < RATE * t["layer's Triton"] else []
            found += [f"{name}: {other}" for other in t if "SGLang" in other and t[other] <= t["layer's Triton"]]
            found += [f"{name}: no SGLang"] if name in products and not any("SGLang" in other for other in t) else []
    small = {name: t for name, t in times.items() if name.startswith("graph_us.below 32 ")}
    found += [name for name, t in small.items() if t["layer"] > t["bare FlashInfer"] + QUANTISED]
    return found if len(small) == 3 else [*found, "below 32 rows: three numbers of rows"]


def test_the_products_keep_theirs() -> None:
    assert broken_products(json.loads(PRODUCTS.read_text())) == []


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("timings", "device_us.product M=512 N=4096 K=7168", "layer's Triton"), 40.0, "device_us.product M=512"),
        (("timings", "device_us.masked, 8 x 512 rows, N=4096 K=7168", "bare DeepGEMM"), 99.0, "device_us.masked"),
        (("timings", "graph_us.below 32 M=16 N=4096 K=7168", "layer"), 15.0, "graph_us.below 32 M=16"),
        (("checks", "products M=64: bits of DeepGEMM"), False, "products M=64: bits"),
        (("checks", "below 32 rows, M=1: FlashInfer alone loses it"), False, "below 32 rows, M=1: FlashInfer alone"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else None,
)
def test_a_broken_promise_of_the_products_is_noticed(place: tuple[str, ...], value: object, said: str) -> None:
    """Negative tests; a slower product loses to DeepGEMM first."""
    made = json.loads(PRODUCTS.read_text())
    at: Any = made
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    assert any(what.startswith(said) for what in broken_products(made))


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_the_promises_are_kept(path: Path) -> None:
    assert broken(json.loads(path.read_text())) == []


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("timings", "host_us.fp8_gemm_nt", "layer"), 99.0, "host_us.fp8_gemm_nt: layer"),
        (("timings", "host_us.fp8_gemm_nt", "kept plan"), 99.0, "host_us.fp8_gemm_nt: kept plan"),
        (("timings", "host_us.switch M=16", "operator"), 99.0, "host_us.switch M=16: operator"),
        (("timings", "device_us.linear M=64 N=4096 K=7168", "layer"), 99.0, "device_us.linear M=64 N=4096 K=7168"),
        (("timings", "graph_us.linear M=16 N=4096 K=7168", "layer"), 99.0, "graph_us.linear M=16 N=4096 K=7168"),
        (("timings", "quantiser_gb_per_s", "layer row-major"), 1000.0, "quantiser: layer row-major"),
        (("checks", "threads: wrong answers of 8000, layer below 32 rows"), 1, "threads: layer below 32 rows"),
        (("checks", "threads: wrong answers of 8000, FlashInfer"), 0, "threads: the race was not seen"),
        (("checks", "graph replay = eager: switch M=16"), False, "check graph replay = eager: switch M=16"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else None,
)
def test_a_broken_promise_is_noticed(place: tuple[str, ...], value: object, said: str) -> None:
    """Negative tests."""
    made = copy.deepcopy(json.loads(RECORDS[0].read_text()))
    at: Any = made
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    (only,) = broken(made)
    assert only.startswith(said)


def differing(kept: list[dict[str, Any]], latest: dict[str, Any]) -> list[str]:
    """Groups of timings of the latest record that the last run of the history has not, or has otherwise."""
    times = {name: t for name, t in latest["timings"].items() if "_us." in name}
    return [name for name, t in times.items() if kept[-1]["timings"].get(name) != t]


def test_the_history_ends_with_the_latest_record() -> None:
    """The page of benchmarks draws the history; its last run is the record that the other page shows."""
    kept = [json.loads(path.read_text()) for path in sorted((FOLDER / "history").glob("*.json"))]
    latest = json.loads((FOLDER / "h200.json").read_text())
    dates = [run["recorded"] for run in kept]
    assert len(kept) >= 4 and dates == sorted(set(dates))
    assert differing(kept, latest) == []
    assert "host_us.fp8_gemm_nt" in differing(kept[:-1], latest)
