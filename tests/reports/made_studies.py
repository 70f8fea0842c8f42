"""Results of studies as they are stored, made up."""

from __future__ import annotations

from typing import Any

from vitclinic._core.statistics import t_interval

HOSTILE_ARM = "<script>alert(1)</script>"
DIFFERENCES = (-0.12, -0.08, -0.15, -0.05, -0.10)


def compared(says: str, measure: str, numbers: dict[int, float], direction: int, status: str) -> dict[str, Any]:
    known = [number for number in numbers.values() if number == number]
    low, high = t_interval(known, 0.975) or ("nan", "nan")
    return {
        **{"says": says, "measure": measure, "direction": direction, "status": status},
        **{"mean": sum(known) / len(known) if known else "nan", "low": low, "high": high},
        **{"seeds": len(known), "missing": len(numbers) - len(known)},
        "numbers": {str(seed): number if number == number else "nan" for seed, number in numbers.items()},
    }


def stored(**changes: Any) -> dict[str, Any]:
    """C6 with five seeds, one arm with a hostile name, a measure that is counted and one run that diverged."""
    seeds = range(5)
    lower, upper = (
        {seed: 0.5 + 0.01 * seed + (d if low else 0) for seed, d in enumerate(DIFFERENCES)} for low in (1, 0)
    )
    values = {
        HOSTILE_ARM: {str(s): {"missing_rate": lower[s], "diverged": 0.0, "accuracy": 0.4 + s / 100} for s in seeds},
        "AdamW": {str(s): {"missing_rate": upper[s], "diverged": float(s == 4), "accuracy": 0.4} for s in seeds},
    }
    values["AdamW"]["4"]["accuracy"] = "nan"
    gains = {s: s / 100 if s < 4 else float("nan") for s in seeds}
    plain = {
        "schema": 1,
        "claim": "C6",
        "study": {
            "claim": "C6",
            "title": "SAM lowers the missing rate between training points",
            "paper": "chen2022",
            "source": "Table 6: 57.9 -> 39.6%",
            "note": "A ViT of 0.7 M parameters that fits 2,000 images, in place of ViT-B/16 on ImageNet.",
            "measures": {
                "missing_rate": {"probe": "missing_rate", "scalar": "missing_rate"},
                "diverged": {"result": "diverged"},
                "accuracy": {"result": "test.accuracy"},
            },
            "expectations": [
                {"says": "SAM lowers the missing rate", "measure": "missing_rate", "less": [HOSTILE_ARM, "AdamW"]},
                {"says": "and is more accurate", "measure": "accuracy", "greater": [HOSTILE_ARM, "AdamW"]},
            ],
        },
        "scale": "cpu",
        "data": ["cifar10"],
        "words": ["epochs=5"],
        "seeds": list(seeds),
        "verdict": "undecided (exploratory)",
        "comparisons": [
            compared("SAM lowers the missing rate", "missing_rate", dict(enumerate(DIFFERENCES)), -1, "as claimed"),
            compared("and is more accurate", "accuracy", gains, 1, "undecided"),
        ],
        "values": values,
        "missing": {"AdamW": {"4": {"accuracy": "the run diverged"}}},
        "runs": {arm: {str(s): f"{place}{s}abcdef" for s in seeds} for place, arm in enumerate(values)},
        "statuses": {
            HOSTILE_ARM: {str(s): "finished" for s in seeds},
            "AdamW": {str(s): "diverged" if s == 4 else "finished" for s in seeds},
        },
        "seconds": 4210.5,
        "date": "2026-11-16",
    }
    return {**plain, **changes}
