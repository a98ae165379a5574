"""A table of measured rows for people; everything else is in the JSON document."""

COLUMNS = ("row", "against", "ours", "theirs", "ratio", "lowest", "highest", "to reach", "NMSE", "GB/s", "peak MiB", "ready s")


def table(results) -> str:
    """Return Markdown: a line for each row and side it was compared with, ours before theirs where a column has both."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- | --- |" + " ---: |" * (len(COLUMNS) - 2)]
    for result in results:
        if result["refused"]:
            cells = [result["what"], "the sides do not compute the same, no speed is measured", *[""] * (len(COLUMNS) - 2)]
            lines.append("| " + " | ".join(cells) + " |")
            continue
        ours, *theirs = result["sides"]
        for side, one in zip(theirs, result["comparisons"]):
            lines.append("| " + " | ".join(_cells(result, ours, side, one)) + " |")
    return "\n".join(lines)


def _cells(result: dict, ours: dict, side: dict, one: dict) -> list[str]:
    starts = "seconds" in ours
    speeds = [f"{s['seconds']:.2f} s" if starts else f"{s['tokens_per_second']:.1f}" for s in (ours, side)]
    gb, bandwidth = ours.get("gb_per_second"), result.get("read_bandwidth")
    target = one["target"]
    wanted = "" if target is None else f"{'≤' if starts else '≥'} {target:.2f}" + ("" if one["reached"] else " missed")
    memory = f"{ours['peak_mib']:.0f} / {side['peak_mib']:.0f}" + (" missed" if ours["peak_mib"] > side["peak_mib"] else "")
    return [
        result["what"], one["against"], *speeds, f"{one['ratio_median']:.3f}", f"{one['ratio_min']:.3f}", f"{one['ratio_max']:.3f}", wanted,
        f"{one['equivalence']['nmse']:.0e}", f"{gb:.1f} ({gb * 1e9 / bandwidth:.0%})" if gb and bandwidth else "",
        memory, f"{ours['load_seconds']:.1f} / {side['load_seconds']:.1f}",
    ]  # fmt: skip


def sides(results) -> str:
    """Say once what each side of each row was."""
    lines = []
    for result in results:
        for side in result.get("sides", ()):
            huge = f", {side['huge_mib']:.0f} MiB in huge pages" if side["huge_mib"] else ""
            lines.append(f"{result['row']}, {side['against']}: {side['name']}, {side['policy']}{huge}")
    return "\n".join(dict.fromkeys(lines))


def quiet(results) -> str:
    """Say how much of the machine's time went elsewhere, at worst."""
    shares = [(r["other_processes"], r["stolen"], max(r["load_before"][0], r["load_after"][0])) for r in results if "other_processes" in r]
    if not shares:
        return "nothing was measured"
    others, stolen, load = (max(column) for column in zip(*shares))
    return f"at worst {others:.0%} of the CPU time went to other processes, {stolen:.0%} was stolen, load {load:.2f}"
