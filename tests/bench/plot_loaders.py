"""Draws what tests/bench/loaders.py or tests/gpu/loading.py measured, and prints it as a table.

    .venv/bin/python tests/bench/plot_loaders.py RESULTS.json... [--svg FILE.svg]

Several results are of one machine, and become one table.

A loader's rate is the checkpoint's bytes over the seconds that its slowest rank took to read them and to put them into
the model's parameters (vLLM's "Loading weights took"); what is read ahead before that is added.
"""

# ruff: noqa: E501 - rows of tables
from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

DISK = "disk"
_STATES = ("cold", "warm")


class Row(NamedTuple):
    """All repeats of one loader: seconds of each, and what the last one used."""

    set: str
    ranks: int
    loader: str
    state: str
    size: int
    seconds: list[float]
    whole: list[float]
    read: float
    memory: float
    gpu: float
    error: str
    unproven: bool

    @property
    def rate(self) -> float:
        """Median, in GB/s; 0 where it failed."""
        return self.size / statistics.median(self.seconds) / 1e9 if self.seconds else 0.0

    @property
    def spread(self) -> str:
        """Slowest and fastest in GB/s."""
        rates = [self.size / seconds / 1e9 for seconds in self.seconds]
        return f"{min(rates):.2f} to {max(rates):.2f}" if rates else ""


def rows(runs: list[dict[str, Any]]) -> list[Row]:
    """Return one row for each loader of each set, ranks and state, in the order of their rates."""
    grouped: dict[tuple[str, int, str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        grouped[run["set"], run["ranks"], run["loader"], run["state"]].append(run)
    found = []
    for (checkpoint, ranks, loader, state), all_runs in grouped.items():
        good = [run for run in all_runs if "error" not in run]
        good = [run for run in good if "unproven" not in run] or good
        each = [rank for run in good for rank in run.get("ranks_measured", [])]
        size = max((run["bytes"] for run in good), default=0)
        found.append(
            Row(
                checkpoint, ranks, loader, state, size,
                [_reading(run) for run in good],
                [run["seconds"] for run in good],
                max((sum(r["read_bytes"] for r in run.get("ranks_measured", [])) for run in good), default=0) / (size or 1),
                max((rank["peak_rss"] for rank in each), default=0),
                max((rank.get("gpu_peak_allocated", 0) for rank in each), default=0),
                next((run["error"] for run in all_runs if "error" in run), "") if not good else "",
                any("unproven" in run for run in good),
            )
        )  # fmt: skip
    return sorted(found, key=lambda row: (row.set, row.ranks, row.state, -row.rate))


def _reading(run: dict[str, Any]) -> float:
    ranks = [rank["weights_seconds"] or rank["load_seconds"] for rank in run.get("ranks_measured", [])]
    return (max(ranks) if ranks else run["seconds"]) + run.get("warm_seconds", 0.0)


def disk_rates(found: list[Row]) -> dict[str, float]:
    """Return the disk's own rate beside each set, in GB/s."""
    return {row.set: row.rate for row in found if row.loader == DISK}


def default_rates(found: list[Row]) -> dict[tuple[str, int, str], float]:
    """Return what vLLM's default reaches, in GB/s."""
    return {(row.set, row.ranks, row.state): row.rate for row in found if row.loader == "lazy"}


def together(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several results of one machine as one; the first one's date and commit stand for all."""
    machines = {(each["about"]["cpu"], *each["about"]["gpus"], *each["about"]["versions"].items()) for each in contents}
    if len(machines) > 1:
        raise SystemExit("the results are of different machines or software: draw them apart")
    sets = {name: one for each in contents for name, one in each["sets"].items()}
    return {"about": contents[0]["about"], "sets": sets, "runs": [run for each in contents for run in each["runs"]]}


def table(content: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    found = rows(content["runs"])
    disks, defaults = disk_rates(found), default_rates(found)
    lines = [
        "| checkpoint | ranks | page cache | loader | GB/s, median | slowest to fastest | of the disk | of the default | seconds | until loaded, s | read, times its size | a rank's peak RSS, GB | GPU peak, GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        if row.error:
            lines.append(f"| {row.set} | {row.ranks} | {row.state} | {row.loader} | failed: {row.error} |" + " |" * 8)
            continue
        of_disk = f"{row.rate / disks[row.set]:.0%}" if row.set in disks else ""
        default = defaults.get((row.set, row.ranks, row.state))
        of_default = f"{row.rate / default:.2f}" if default and row.loader != DISK else ""
        is_disk = row.loader == DISK
        lines.append(
            f"| {row.set} | {row.ranks or ''} | {row.state}{' (not proven)' * row.unproven} | {row.loader} | {row.rate:.2f} | {row.spread} | {of_disk} | {of_default} | "
            f"{statistics.median(row.seconds):.1f} | {'' if is_disk else f'{statistics.median(row.whole):.1f}'} | "
            f"{'' if is_disk else f'{row.read:.2f}'} | {'' if is_disk else f'{row.memory / 1e9:.1f}'} | "
            f"{f'{row.gpu / 1e9:.1f}' if row.gpu else ''} |"
        )
    about = content["about"]
    machine = (
        f"{about['cpu']}, {about['memory']} GiB, {', '.join(about['gpus']) or 'no GPU'}; Linux {about['kernel']}; "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    )
    sets = "; ".join(
        f"{name}: {one['bytes'] / 1e9:.1f} GB, {one['tensors']:,} tensors, {one['shards']} shards"
        for name, one in content["sets"].items()
    )
    return "\n".join([f"{machine}. {about['began'][:10]}, commit {about['commit'][:12]}. {sets}.", "", *lines])


def draw(content: dict[str, Any], svg: Path) -> None:
    """Draw a panel for each set and number of ranks: rates by loader, cold and warm, with the disk's as a line."""
    import matplotlib as mpl  # noqa: PLC0415 - not needed for the table

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "loaders"
    import matplotlib.pyplot as plt  # noqa: PLC0415

    found = rows(content["runs"])
    disks = disk_rates(found)
    panels = sorted({(row.set, row.ranks) for row in found if row.loader != DISK})
    figure, all_axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), squeeze=False)
    for axes, (checkpoint, ranks) in zip(all_axes[0], panels, strict=True):
        here = [row for row in found if (row.set, row.ranks) == (checkpoint, ranks) and not row.error]
        loaders = sorted({row.loader for row in here}, key=lambda name: max(r.rate for r in here if r.loader == name))
        for offset, (state, colour) in enumerate(zip(_STATES, ("#2c6fbb", "#d98c3f"), strict=True)):
            rated = [(loaders.index(row.loader), row) for row in here if row.state == state]
            if not rated:
                continue
            rates = [row.rate for _, row in rated]
            low = [row.rate - row.size / max(row.seconds) / 1e9 for _, row in rated]
            high = [row.size / min(row.seconds) / 1e9 - row.rate for _, row in rated]
            places = [place + 0.2 - 0.4 * offset for place, _ in rated]
            axes.barh(places, rates, 0.38, xerr=[low, high], color=colour, label=state, error_kw={"linewidth": 0.8})
        if checkpoint in disks:
            axes.axvline(disks[checkpoint], color="black", linestyle="--", linewidth=1, label="disk, O_DIRECT")
        axes.set_yticks(range(len(loaders)), loaders)
        axes.set_xlabel("GB/s into the model's parameters")
        axes.set_title(
            f"{content['sets'][checkpoint]['bytes'] / 1e9:.0f} GB, {'INT4' if content['sets'][checkpoint]['int4'] else 'BF16'}, TP{ranks}"
        )
    handles, labels = max((axes.get_legend_handles_labels() for axes in all_axes[0]), key=lambda both: len(both[0]))
    figure.legend(handles, labels, loc="upper left", ncols=len(labels), fontsize="small", frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(svg, metadata={"Date": None})


def main() -> None:
    """Print the table, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    content = together([json.loads(path.read_text()) for path in arguments.results])
    print(table(content))
    if arguments.svg:
        draw(content, arguments.svg)


if __name__ == "__main__":
    main()
