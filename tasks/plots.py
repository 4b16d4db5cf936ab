"""The report's plots, as SVG texts; the same numbers give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.follow import Metrics
from tasks.places import stage_folder
from tasks.results import current, results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREY = "#2166ac", "#c2571a", "#8794a0"


@dataclass(frozen=True)
class Plot:
    """One figure with its caption."""

    caption: str
    svg: str


def draw_all(project: Path) -> list[Plot]:
    """All plots for which there are numbers."""
    plots: list[Plot] = []
    known, now = results(project), current(project)
    course = {
        stage: _series(stage_folder(project, stage) / "metrics.jsonl") if stage in now else {}
        for stage in ("sft", "reward", "judge", "optimize")
    }
    optimize = course["optimize"]
    reward = [key for key in ("reward", "score", "judge") if key in optimize]
    plots += _lines("Reward during optimisation", optimize, reward, "score of an answer")
    plots += _lines(
        "KL to the SFT model during optimisation",
        optimize,
        [key for key in ("kl",) if key in optimize],
        "nats an answer",
    )
    for stage, series in course.items():
        plots += _lines(f"Loss: {stage}", series, [key for key in ("loss",) if key in series], "loss")
    slices = known["evaluate"].get("slices")
    if isinstance(slices, list) and slices:
        plots.append(_figure("Win rate by slice, with interval", partial(_slices, slices)))
    for stage in ("reward", "judge"):
        calibration = known[stage].get("calibration")
        bins = calibration.get("bins") if isinstance(calibration, dict) else None
        if isinstance(bins, list) and bins:
            plots.append(_figure(f"Calibration: {stage}", partial(_calibration, bins)))
    return plots


def _series(file: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Metric -> steps and values."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for step, row in Metrics(file).read():
        for key, value in row.items():
            steps, values = series.setdefault(key, ([], []))
            steps.append(step)
            values.append(value)
    return series


def _lines(
    caption: str, series: dict[str, tuple[list[int], list[float]]], keys: Sequence[str], unit: str
) -> list[Plot]:
    if not keys:
        return []

    def draw(axes: Axes) -> None:
        for key, colour in zip(keys, (_BLUE, _ORANGE, _GREY), strict=False):
            steps, values = series[key]
            axes.plot(steps, values, color=colour, label=key, marker="." if len(steps) < 60 else "")
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        if len(keys) > 1:
            axes.legend(frameon=False)

    return [_figure(caption, draw)]


def _slices(slices: Sequence[dict[str, Any]], axes: Axes) -> None:
    rates = [part["win_rate"] for part in slices]
    below = [part["win_rate"] - part["interval"][0] for part in slices]
    above = [part["interval"][1] - part["win_rate"] for part in slices]
    places = range(len(slices))
    axes.errorbar(rates, places, xerr=[below, above], fmt="o", color=_BLUE, capsize=3)
    axes.axvline(0.5, color=_GREY, linestyle="--", linewidth=1)
    axes.set_yticks(list(places), [f"{part['slice']} ({part['n']})" for part in slices])
    axes.set_xlim(0, 1)
    axes.set_xlabel("win rate")
    axes.set_ylabel("slice (prompts)")


def _calibration(bins: Sequence[dict[str, Any]], axes: Axes) -> None:
    filled = [part for part in bins if part.get("n")]
    axes.plot([0, 1], [0, 1], color=_GREY, linestyle="--", linewidth=1)
    axes.plot([b["confidence"] for b in filled], [b["accuracy"] for b in filled], "o-", color=_BLUE)
    axes.set_xlabel("predicted chance")
    axes.set_ylabel("share that was right")


def _figure(caption: str, draw: Callable[[Axes], None]) -> Plot:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "plumbline", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(5.4, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return Plot(caption, svg[svg.index("<svg") :])
