"""Timelines: when each device of a pipeline runs which action, predicted and measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundpipe_fx.runtime.pipeline_run import Span
from roundpipe_fx.schedules import Action, ActionKind, Timing


@dataclass(frozen=True, slots=True)
class Bar:
    """An action of a device.

    Attributes:
        device: index of the device.
        start: seconds since the beginning of the step.
        end: seconds since the beginning of the step.
        bytes: bytes that the device has allocated at most meanwhile, as predicted; 0 if measured.
    """

    device: int
    action: Action
    start: float
    end: float
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBar:
    """A copy between a device and the host, as predicted.

    Attributes:
        device: index of the device.
        action: for a copy to the host, the action behind which it begins; for one to the device, the action that reads.
        what: ``"weights"`` that some actions read, their ``"gradients"``, or ``"values"`` of a microbatch.
        to_host: whether it is to the host.
        start: seconds since the beginning of the step.
        end: seconds since the beginning of the step.
        values: names of the values.
    """

    device: int
    action: Action
    what: str
    to_host: bool
    start: float
    end: float
    bytes: int
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """When each device runs which action.

    Attributes:
        predicted: simulated, with modelled costs.
        measured: measured in the latest step; empty before the first one.
        copies: simulated copies between the devices and the host.
    """

    predicted: tuple[Bar, ...]
    measured: tuple[Bar, ...]
    copies: tuple[CopyBar, ...] = ()

    @classmethod
    def of(cls, timing: Timing, spans: Sequence[Sequence[Span]] | None, names: Mapping[int, str]) -> Timeline:
        """Make a timeline.

        Args:
            spans: for each device, the times of its actions in a step; ``None`` if there was no step.
            names: of values that leave the devices, by number.

        Returns:
            the timeline.
        """
        predicted = []
        orders = [timing.schedule.actions(device) for device in range(timing.schedule.devices)]
        copies = list(_list_copies(timing, orders, names))
        for device, columns in enumerate(zip(timing.starts, timing.ends, timing.action_bytes, strict=True)):
            actions = orders[device]
            predicted += [
                # Starts, ends and bytes are in the order of the schedule's actions.
                Bar(device, action, float(start), float(end), int(size))
                for action, start, end, size in zip(actions, *columns, strict=True)
            ]
        measured = [
            Bar(device, span.action, *span.seconds())
            for device, device_spans in enumerate(spans or ())
            for span in device_spans
        ]
        return cls(tuple(predicted), tuple(measured), tuple(copies))

    def write(self, path: str | Path) -> Path:
        """Write a Chrome trace (JSON), which ui.perfetto.dev opens, with a row for each device.

        Copies between devices and the host have rows of their own, one for each direction of a device's link.

        Args:
            path: the file to write.

        Returns:
            the path.
        """
        events: list[dict[str, Any]] = []
        # Chrome's trace format: processes are "predicted" and "measured", threads are devices, times are in
        # microseconds.
        for process, (name, bars) in enumerate((("predicted", self.predicted), ("measured", self.measured))):
            if not bars:
                continue
            events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
            for device in sorted({bar.device for bar in bars}):
                label = {"name": f"device {device}"}
                events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": device, "args": label})
            events += [
                {
                    "ph": "X",
                    "name": str(bar.action),
                    "cat": _NAMES[bar.action.kind],
                    "pid": process,
                    "tid": bar.device,
                    "ts": bar.start * 1e6,
                    "dur": (bar.end - bar.start) * 1e6,
                    "args": {"stage": bar.action.stage, "microbatch": bar.action.microbatch},
                }
                for bar in bars
            ]
        events += self._copy_events()
        target = Path(path)
        target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return target

    def _copy_events(self) -> list[dict[str, Any]]:
        """Events of a trace for the copies, in rows behind those of the devices."""
        # Rows of copies get numbers beyond all devices, so that they stand below them.
        rows = {
            key: _COPY_ROWS + position
            for position, key in enumerate(sorted({(c.device, c.to_host) for c in self.copies}))
        }
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": 0,
                "tid": row,
                "args": {"name": f"device {device} {'to' if to_host else 'from'} the host"},
            }
            for (device, to_host), row in rows.items()
        ]
        return events + [
            {
                "ph": "X",
                "name": f"{copy.what} {'after' if copy.to_host else 'for'} {copy.action}",
                "cat": f"copy of {copy.what}",
                "pid": 0,
                "tid": rows[copy.device, copy.to_host],
                "ts": copy.start * 1e6,
                "dur": (copy.end - copy.start) * 1e6,
                "args": {"bytes": copy.bytes, **({"values": " ".join(copy.values)} if copy.values else {})},
            }
            for copy in self.copies
        ]

    def plot(self, path: str | Path) -> Path:
        """Plot the timeline.

        Args:
            path: the file to write; its extension gives the format (``.png``, ``.svg``, ``.pdf``).

        Returns:
            the path.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("a timeline's picture needs matplotlib: pip install 'roundpipe_fx[plot]'") from error
        shown = [(name, bars) for name, bars in (("predicted", self.predicted), ("measured", self.measured)) if bars]
        # Both pictures have as many rows, so that devices stand side by side.
        devices = 1 + max(bar.device for _, bars in shown for bar in bars)
        figure = Figure(figsize=(12, max(2.0, 0.5 * devices + 1) * len(shown)), layout="constrained")
        axes_of_devices = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for axes, (name, bars) in zip(axes_of_devices, shown, strict=True):
            for bar in bars:
                width = (bar.end - bar.start) * 1e3
                axes.barh(
                    bar.device, width, left=bar.start * 1e3, color=_COLORS[bar.action.kind], edgecolor="white", lw=0.5
                )
            axes.set(xlabel="ms", ylabel="device", title=name, yticks=range(devices))
            # Device 0 at the top, as in papers on pipelines.
            axes.invert_yaxis()
        kinds = [kind for kind in _COLORS if any(bar.action.kind is kind for _, bars in shown for bar in bars)]
        handles = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in kinds]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        target = Path(path)
        figure.savefig(target, dpi=120)
        return target


def _list_copies(timing: Timing, orders: Sequence[Sequence[Action]], names: Mapping[int, str]) -> Iterator[CopyBar]:
    """List the copies between the devices and the host."""
    for copy in timing.window_copies:
        yield CopyBar(
            device=copy.device,
            action=orders[copy.device][copy.position],
            what="gradients" if copy.to_host else "weights",
            to_host=copy.to_host,
            start=copy.start,
            end=copy.end,
            bytes=copy.bytes,
        )
    for offload, (leaves, freed_at, returns, back) in zip(timing.offloads, timing.offload_spans, strict=True):
        maker, reader = orders[offload.device][offload.leaves - 1], orders[offload.device][offload.back]
        # A value that leaves has two copies: one behind its maker, one in front of its reader.
        for action, to_host, start, end in ((maker, True, leaves, freed_at), (reader, False, returns, back)):
            yield CopyBar(
                device=offload.device,
                action=action,
                what="values",
                to_host=to_host,
                start=start,
                end=end,
                bytes=offload.bytes,
                values=tuple(names[number] for number, _ in offload.values),
            )


_COPY_ROWS = 1 << 20
"""Number of the first row of copies in a trace: greater than those of devices."""
_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of parameters",
}
_COLORS = {
    ActionKind.FORWARD: "tab:blue",
    ActionKind.RECOMPUTE: "tab:orange",
    ActionKind.BACKWARD: "tab:green",
    ActionKind.BACKWARD_INPUT: "tab:olive",
    ActionKind.BACKWARD_WEIGHT: "tab:cyan",
}
