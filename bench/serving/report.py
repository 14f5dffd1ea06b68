"""The figures as a table in Markdown and as plots. Nothing is computed here but ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def as_markdown(figures: Mapping[str, Any]) -> str:
    lines = [f"Devices: {', '.join(figures['devices'])}", ""]
    for title, write in (
        ("hand_over", _hand_over),
        ("landing", _landing),
        ("link", _link),
        ("loads", _loads),
        ("kill_prefill", _harm),
        ("kill_decode", _harm),
        ("soak", _soak),
    ):
        section = figures.get(title)
        if isinstance(section, Mapping):
            lines += [f"## {title}", "", *write(section), ""]
    if figures.get("missing"):
        lines += ["Missing: " + "; ".join(f"{name} ({why})" for name, why in figures["missing"].items()), ""]
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [_row(*head), _row(*("---" for _ in head)), *(_row(*cells) for cells in rows)]


def _hand_over(section: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            f"hand-over of {section['payload_mib']:.0f} MiB, overlapped, ms",
            f"{section['handover_ms']['overlapped']:.2f}",
        ),
        ("the same, cached on P, ms", f"{section['handover_ms']['cached']:.2f} ({section['cached_gb_s']:.0f} GB/s)"),
        ("gap before the second token less the median ITL, ms", f"{section['second_token_gap_ms']:.2f}"),
        ("TTFT over P and D less TTFT on D alone, ms", f"{section['ttft_added_ms']:.2f}"),
    ]
    return _table(("figure", section["lane"]), rows)


def _landing(section: Mapping[str, Any]) -> list[str]:
    rows = []
    first, second, third, last = section["alone"]
    phases = (
        ("alone", first),
        ("landing at full rate", section["landing_at_full_rate"]),
        ("alone", second),
        ("landing nearly so fast, evenly", section["landing_evenly"]),
        ("alone", third),
        ("landing, paced", section["landing_paced"]),
        ("alone", last),
    )
    for name, phase in phases:
        rows.append(
            (
                name,
                f"{phase['landed_gb_s']:.1f}",
                f"{phase['step_p50_ms']:.2f} / {phase['step_p99_ms']:.2f}",
                f"{phase['client_itl_p50_ms']:.2f} / {phase['client_itl_p99_ms']:.2f}",
            )
        )
    lines = _table((f"{section['streams']} streams", "KV, GB/s", "step p50 / p99, ms", "client p50 / p99, ms"), rows)
    beyond = section["step_price_of_landing"] or {}
    return [
        *lines,
        *_table(
            ("beyond what the batch asks for", "step p50", "step p99"),
            [(name, f"{grown['p50']:+.1%}", f"{grown['p99']:+.1%}") for name, grown in beyond.items()],
        ),
    ]


def _link(section: Mapping[str, Any]) -> list[str]:
    return _table(("bytes between the devices", "GB/s"), [(name, f"{rate:.1f}") for name, rate in section.items()])


def _loads(section: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for workload, found in section.items():
        rows = []
        for system, points in found["points"].items():
            for point in points:
                attained = " / ".join(f"{share['mean']:.0%}" for share in point["attainment"].values())
                rows.append(
                    (
                        system,
                        point["rate"],
                        f"{point['ttft_ms']['p50']:.0f} / {point['ttft_ms']['p99']:.0f}",
                        f"{point['tpot_ms']['p50']:.1f} / {point['tpot_ms']['p99']:.1f}",
                        attained,
                        point["errors"],
                    )
                )
        limits = " / ".join(found["goodput"])
        head = (
            workload,
            "requests/s",
            "TTFT p50 / p99, ms",
            "TPOT p50 / p99, ms",
            f"good at TPOT {limits} ms",
            "errors",
        )
        lines += [*_table(head, rows), ""]
        systems = list(found["points"])
        goodput = [
            (limit, *(_goodput(row[name]) for name in systems), row["winner"])
            for limit, row in found["goodput"].items()
        ]
        lines += [
            *_table((f"{workload}: TPOT limit, ms", *(f"{name}, requests/s" for name in systems), "more"), goodput),
            "",
        ]
    return lines


def _goodput(found: Mapping[str, Any]) -> str:
    if found["high"] is None:
        return f"at least {found['low']:g}"
    return f"{found['rate']:.1f} (between {found['low']:g} and {found['high']:g})"


def _harm(section: Mapping[str, Any]) -> list[str]:
    gap = section["gap_ms"]
    rows = [
        ("errors", f"{section['errors']} of {section['requests']}"),
        ("streams running at the kill", gap["streams"]),
        ("their longest gap, median / worst, ms", f"{gap.get('median', 0):.0f} / {gap.get('worst', 0):.0f}"),
        ("tokens computed again", f"{section['recomputed_tokens']:.0f}"),
    ]
    return _table((f"{section['victim']} killed", ""), rows)


def _soak(section: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for node, found in section["growth"].items():
        for what, values in found.items():
            rows.append((f"{node} {what}", f"{values['first_third']:.0f}", f"{values['last_third']:.0f}"))
    rows.append(("left over at the end", "", f"{sum(section['left_over'].values()):.0f}"))
    rows.append(("errors", "", f"{section['errors']} of {section['requests']}"))
    return _table((f"{section['seconds']:.0f} s", "most in the first third", "most in the last"), rows)


def draw_loads(section: Mapping[str, Any], folder: Path) -> list[Path]:
    """One picture a workload: TTFT, TPOT and attainment over the offered rate. Needs matplotlib."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")

    drawn = []
    for workload, found in section.items():
        limits = list(found["goodput"])
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.2))
        for system, points in found["points"].items():
            rates = [point["rate"] for point in points]
            for axis, name in ((axes[0], "ttft_ms"), (axes[1], "tpot_ms")):
                (line,) = axis.plot(rates, [point[name]["p50"] for point in points], marker="o", label=f"{system} p50")
                axis.plot(rates, [point[name]["p99"] for point in points], "--", color=line.get_color(), label="p99")
            for limit, style in ((limits[0], "-"), (limits[len(limits) // 2], "--"), (limits[-1], ":")):
                shares = [100 * point["attainment"][limit]["mean"] for point in points]
                axes[2].plot(rates, shares, style, color=line.get_color(), label=f"{system}, {limit} ms")
        for axis, title in zip(axes, ("TTFT, ms", "TPOT, ms", "good requests, %"), strict=True):
            axis.set_xlabel("requests/s offered")
            axis.set_title(title, fontsize=9)
            axis.legend(fontsize=6)
        axes[0].set_yscale("log")
        figure.suptitle(workload, fontsize=9)
        figure.tight_layout()
        file = folder / f"{workload.replace('/', '-').replace(' ', '-')}.png"
        figure.savefig(file, dpi=90)
        pyplot.close(figure)
        drawn.append(file)
    return drawn
