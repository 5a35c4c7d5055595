"""What was measured, as Markdown."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.bench.peers.harness import described

Result = dict[str, Any]

PRODUCT = "product"
"""The side that says at which rate operations can be done."""
HEADER = (
    "row", "side", "setting", "first s", "s, median (range)", "CPU s", "peak MiB", "off by",
    "s / ours (range)", "CPU s / ours", "s / operations at the product's rate",
)  # fmt: skip
WINS = 1.1
"""From here on a difference is called one."""


def versions(results: Iterable[Result]) -> str:
    """Packages and versions of all sides, once each."""
    found: dict[str, str] = {}
    for result in results:
        for side in result["sides"]:
            name = side["side"]
            line = ", ".join(f"{key} {value}" for key, value in side.get("versions", {}).items())
            if line and line not in found.values():
                found[name] = line
    return "; ".join(found.values())


def table(results: Sequence[Result]) -> str:
    """The rows of each group, what is the same in each, and where a peer is ahead."""
    lines: list[str] = []
    groups = list(dict.fromkeys(result["group"] for result in results))
    for group in groups:
        members = [result for result in results if result["group"] == group]
        lines += [f"### {group[:1].upper()}{group[1:]}", ""]
        lines += [f"- **{one['row']}**: {one['same']}" for one in members]
        lines += ["", _line(HEADER), "|" + "---|" * len(HEADER)]
        for one in members:
            lines += [_line(cells) for cells in _cells(one)]
        lines += ["", *[line for one in members for line in verdicts(one)], ""]
        if tried := [line for one in members for line in attempts(one)]:
            lines += ["Settings that were tried, seconds of one call (off by):", "", *tried, ""]
    lines.append(f"Versions: {versions(results)}.")
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ours(result: Result) -> Result | None:
    ours = result["sides"][0]
    return ours if "wall" in ours and "failed" not in ours else None


def ratios(side: Result, ours: Result, key: str = "walls") -> list[float]:
    """A side's time over ours, a repetition at a time."""
    return [a / b for a, b in zip(side[key], ours[key], strict=False)]


def spread(side: Result, ours: Result) -> tuple[float, float]:
    """The least and the greatest ratio, of any repetition of a side to any of ours."""
    return min(side["walls"]) / max(ours["walls"]), max(side["walls"]) / min(ours["walls"])


def _cells(result: Result) -> list[list[str]]:
    ours, rate = _ours(result), None
    for side in result["sides"]:
        if side["side"] == PRODUCT and "wall" in side:
            rate = side["operations"] / side["wall"]
    rows = []
    for side in result["sides"]:
        if side["side"] == PRODUCT or ("walls" not in side and "failed" not in side):
            continue
        setting = described(side.get("options", {}))
        start = [result["row"], side["side"], setting]
        if "failed" in side:
            rows.append([*start, f"**{side['failed']}**", *[""] * (len(HEADER) - 4)])
            continue
        walls = side["walls"]
        peak = (side["peak"] - side["idle"]) / 2**20
        cells = [
            *start, f"{side['first']:.2f}",
            f"{side['wall']:.3g} ({min(walls):.3g} to {max(walls):.3g})", f"{side['cpu']:.3g}",
            f"{peak:.0f}", f"{side['off']:.0e}" if side.get("off") is not None else "",
        ]  # fmt: skip
        if ours is None or side is ours:
            cells += ["", ""]
        else:
            low, high = spread(side, ours)
            middle = statistics.median(ratios(side, ours))
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            cells.append(f"{statistics.median(ratios(side, ours, 'cpus')):.2f}")
        operations = side.get("operations")
        cells.append(f"{side['wall'] * rate / operations:.2f}" if rate and operations else "")
        rows.append(cells)
    return rows


def verdicts(result: Result) -> list[str]:
    """A sentence for every peer that is ahead by more than a tenth, or that could not."""
    ours, out = _ours(result), []
    for side in result["sides"][1:]:
        if side["side"] == PRODUCT or ours is None or "walls" not in side or "failed" in side:
            continue
        if side.get("off") is None:  # work of its own, such as another optimiser's step
            continue
        middle = statistics.median(ratios(side, ours))
        if middle * WINS < 1:
            line = f"**{result['row']}: {side['side']} is ahead, {1 / middle:.2f} times.**"
            out.append(f"- {line} {result.get('why', '')}".rstrip())
    return out


def attempts(result: Result) -> list[str]:
    """Every setting of a side that has several: work and precision."""
    out = []
    for side in result["sides"]:
        tried = side.get("tried", ())
        if len(tried) < 2:
            continue
        cells = []
        for one in tried:
            said = one.get("failed") or f"{one['wall']:.3g} s ({one['off']:.0e})"
            cells.append(f"{described(one['options']) or 'as it is'}: {said}")
        out.append(f"- {result['row']}, {side['side']}: {'; '.join(cells)}.")
    return out


def confirmed(first: Sequence[Result], second: Sequence[Result]) -> list[str]:
    """For every ratio of a run whether another run confirms it.

    It does where its median lies within the first one's range, or at least the ranges overlap.

    Args:
        first: results of a run.
        second: of another; rows and sides that only one of them has are left out.
    """
    others = {result["row"]: result for result in second}
    out = []
    for one in first:
        other = others.get(one["row"])
        ours, theirs = _ours(one), _ours(other) if other else None
        if other is None or ours is None or theirs is None:
            continue
        again = {side["side"]: side for side in other["sides"]}
        for side in one["sides"][1:]:
            twin = again.get(side["side"], {})
            if side["side"] == PRODUCT:
                continue
            if any("walls" not in each or "failed" in each for each in (side, twin)):
                continue
            (low, high), middle = spread(side, ours), statistics.median(ratios(twin, theirs))
            least, most = spread(twin, theirs)
            inside = "within" if low <= middle <= high else "**outside**"
            if inside != "within" and least <= high and low <= most:
                inside = f"({least:.2f} to {most:.2f}) overlaps with"
            out.append(
                f"- {one['row']}, {side['side']}: {middle:.2f} {_is(inside)} {low:.2f} to "
                f"{high:.2f}."
            )
    return out


def _is(where: str) -> str:
    return where if where.startswith("(") else f"is {where}"
