"""``roundpipe-fx``: plans, what they say of a value, trade-offs, and which batch fits a GPU, without that GPU.

Exit codes: 0; 1 where a step does not fit; 2 where what was asked for cannot be understood, or the model fails. Errors
are one line.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.command_line import commands
from roundpipe_fx.command_line.adapters import EXAMPLE, Lora, parse_lora
from roundpipe_fx.command_line.model_of import CommandError
from roundpipe_fx.command_line.quantized_base import KINDS

_LOGGER = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parent.parent
_MODEL = "a Hugging Face configuration (folder or name), or module:function"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: those after the program's name; ``None``: the process's.

    Returns:
        the exit code.
    """
    asked = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], tuple[str, Any]] = asked.run
    try:
        text, data = run(asked)
    except InfeasibleBudgetError as error:
        return _failed(error, 1)
    except (CommandError, OSError) as error:
        return _failed(error, 2)
    except Exception as error:
        # The innermost frame says where to look: nearly always in the model's code, which may raise any exception.
        *_, frame = traceback.extract_tb(error.__traceback__)
        if isinstance(error, ValueError | TypeError) and Path(frame.filename).is_relative_to(_PACKAGE):
            return _failed(error, 2)
        _LOGGER.debug("The command failed:", exc_info=True)
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        message = f"{type(error).__name__}: {error} ({where}); TORCH_LOGS=+roundpipe_fx prints the traceback"
        return _failed(message, 2)
    try:
        print(json.dumps(data, indent=1, default=dict) if asked.json else text, flush=True)
    except BrokenPipeError:  # the reader has seen enough
        # The rest of the buffer is written when Python exits, and would raise once more: it goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _failed(error: Exception | str, code: int) -> int:
    text = str(error)
    # ``strerror`` alone: the text of an OSError begins with "[Errno 2]".
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"roundpipe-fx: {' '.join(text.split())}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """One whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"roundpipe-fx: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="roundpipe-fx",
        description="Plans training steps without running them: what they need, what is recomputed, which batch fits a "
        "GPU that need not be there.",
    )
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], tuple[str, Any]], help: str) -> argparse.ArgumentParser:
        added = parsers.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print JSON")
        return added

    planning = command("plan", commands.plan, "plan a training step and print what it needs")
    _add_model(planning)
    _add_batch(planning)
    _add_mesh(planning)
    planning.add_argument("--details", action="store_true", help="print every stage")
    planning.add_argument("--output", type=Path, metavar="FILE", help="write the plan as JSON")
    _add_page(planning, "write a page to explore the plan with")
    fitting = command("fit", commands.fit, "the largest batch whose step fits a device")
    _add_model(fitting)
    _add_optimizer(fitting)
    explaining = command("explain", commands.explain, "what happens to a value, or to all values of a module")
    trade_off = command("frontier", commands.frontier, "peak bytes against modelled seconds of recomputation")
    for added in (explaining, trade_off):
        _add_model(added, f"a plan in JSON, {_MODEL}")
        _add_batch(added)
    explaining.add_argument("name", help="of the value or the module")
    comparing = command("compare", commands.compare, "two plans side by side")
    comparing.add_argument("plans", type=Path, nargs=2, metavar="PLAN", help="a plan in JSON")
    _add_page(comparing, "write a page of both plans")
    showing = command("show", commands.show, "print a plan from JSON")
    showing.add_argument("plan", type=Path, help="a plan in JSON")
    showing.add_argument("--details", action="store_true", help="print every stage")
    _add_page(showing, "write a page to explore the plan with")
    reporting = command("report", commands.report, "versions, devices and a plan's figures, to paste into an issue")
    reporting.add_argument("plan", type=Path, nargs="?", help="a plan in JSON")
    command("devices", commands.devices, "devices that can be planned for")
    return parser


def _add_model(parser: argparse.ArgumentParser, help: str = _MODEL) -> None:
    parser.add_argument("model", help=help)
    parser.add_argument(
        "--sequence", type=_positive, default=128, metavar="TOKENS", help="length of a row; default 128"
    )
    parser.add_argument("--device", help="name of a device, see the command devices; default: this machine's")
    parser.add_argument(
        "--devices", type=_positive, default=1, metavar="N", help="number of devices to pipeline over; default 1"
    )
    parser.add_argument("--memory-budget", type=_budget, metavar="BYTES", help="such as 6GiB, or a share in [0, 1]")
    parser.add_argument("--tiling", choices=["auto", "never"], help="default: tiles where no plan fits without")
    parser.add_argument("--dtype", help="of the parameters, such as bfloat16")
    parser.add_argument("--lora", type=_lora, metavar="r=16,…", help=f"freeze the model, add adapters: {EXAMPLE}")
    parser.add_argument("--quantize", choices=KINDS, help="the frozen weights of linear layers, with --lora")
    parser.add_argument("--offloaded", action="store_true", help="the model stays on the host")
    parser.add_argument("--num-microbatches", type=_positive, metavar="N", help="that a batch is split into")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=_positive, default=1, metavar="ROWS", help="rows of a batch; default 1")


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh-shape",
        type=_mesh,
        metavar="DPxPP",
        help="replicas x devices of each, such as 64x16, or 64x16x8 if groups of eight devices share out the model's "
        "layers; or a number of devices, which are then divided, with the batch of all replicas",
    )
    parser.add_argument(
        "--shard", choices=["dp"], help="shard parameters, gradients and optimizer state across replicas"
    )
    parser.add_argument("--schedule", metavar="NAME", help="of the pipeline, or auto: the quickest; default 1f1b")
    _add_optimizer(parser)


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--optimizer", metavar="CLASS", help="of torch.optim, such as AdamW, whose state is counted")


def _add_page(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help=help)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _lora(text: str) -> Lora:
    try:
        return parse_lora(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _mesh(text: str) -> int | tuple[int, ...]:
    parts = tuple(map(_positive, text.split("x")))
    return parts if len(parts) > 1 else parts[0]


def _budget(text: str) -> int | float | str:
    # In this order: "1" is one byte, "1.0" and "0.8" are shares, and "6GiB" is parsed with the other options.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
