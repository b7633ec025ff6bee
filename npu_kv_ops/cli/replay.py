"""`npu-kv replay`: a trace of requests through a device pool and a host pool."""

from __future__ import annotations

import argparse
import importlib.util
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from npu_kv_ops.replay import report
from npu_kv_ops.replay.engine import DEFAULT_AHEAD, Replay, free_memory
from npu_kv_ops.replay.models import PRESETS, KVModel, ModelError, load_model
from npu_kv_ops.replay.movers import MOVERS
from npu_kv_ops.replay.sizing import Sizes, SizingError, choose_sizes
from npu_kv_ops.replay.synthetic import synthetic_trace
from npu_kv_ops.replay.trace import BlockMap, BlockNeed, Request, check_block_tokens, read_trace

from . import runtime_choice

_SHOWN_MISMATCHES = 10

_MOST_REQUESTS = 1_000_000
_MOST_BLOCKS = 2**31 - 1
_MOST_BLOCK_TOKENS = 1 << 20
_MOST_SHRINK = 2**31 - 1
"""What no run can have use for: a slip of the finger, better refused than tried."""


def _whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small, it must be {minimum} or more")
        if maximum is not None and value > maximum:
            raise argparse.ArgumentTypeError(f"{value} is too large, it must be {maximum} or less")
        return value

    return parse


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def _block_tokens(text: str) -> int:
    value = _whole(1, _MOST_BLOCK_TOKENS)(text)
    try:
        check_block_tokens(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def add_parser(commands: Any) -> None:
    """Adds the command to `npu-kv`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="replay a trace of requests through a device pool and a host pool of KV blocks",
        description="Replays a trace through a device pool and a host pool of KV blocks. Every "
        "block that moves goes through the copy backend or the operator, and its bytes are checked "
        "before a request uses it.",
    )
    parser.add_argument(
        "trace",
        nargs="?",
        type=Path,
        metavar="TRACE",
        help="JSON lines with timestamp (ms), input_length, output_length and hash_ids (of blocks "
        "of 512 tokens)",
    )
    parser.add_argument(
        "--synthetic",
        type=_whole(1, _MOST_REQUESTS),
        metavar="N",
        help="instead of TRACE: N requests of made-up chats with shared prefixes",
    )
    parser.add_argument("--seed", type=_whole(0), default=0, help="of --synthetic and sampling")
    parser.add_argument(
        "--model",
        default="llama-3.1-8b",
        help=f"{', '.join(PRESETS)}, or the path of a Hugging Face config.json (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--block-tokens",
        type=_block_tokens,
        default=128,
        metavar="N",
        help="tokens in a block; divides 512 or is a multiple of it (default: %(default)s)",
    )
    blocks = _whole(1, _MOST_BLOCKS)
    parser.add_argument("--device-blocks", type=blocks, metavar="N", help="size of the device pool")
    parser.add_argument("--host-blocks", type=blocks, metavar="N", help="size of the host pool")
    parser.add_argument(
        "--shrink",
        type=_whole(1, _MOST_SHRINK),
        metavar="N",
        help="divide the bytes of every tensor's blocks by N; layers and tensors stay",
    )
    parser.add_argument(
        "--policy",
        choices=("eager", "lazy"),
        default="eager",
        help="store a block to the host when it is computed (eager, default) or when the device "
        "pool evicts it (lazy)",
    )
    parser.add_argument(
        "--backend",
        choices=tuple(MOVERS),
        default="scheduler",
        help="move blocks with NPUDmaCopyBackend, whose thread launches the copies (scheduler, "
        "default), or with calls of torch.ops.npu_kv.swap_blocks_batch (eager)",
    )
    parser.add_argument(
        "--ahead",
        type=_whole(0),
        default=DEFAULT_AHEAD,
        metavar="N",
        help="load blocks for up to N next requests while one is served, as far as the device pool "
        "has room (default: %(default)s)",
    )
    parser.add_argument(
        "--requests", type=_whole(1), metavar="N", help="replay only the first N requests"
    )
    parser.add_argument(
        "--speed",
        type=_speed,
        metavar="X",
        help="start requests at their timestamps, X times as fast (default: as fast as possible)",
    )
    parser.add_argument(
        "--verify",
        choices=("all", "sample", "off"),
        default="all",
        help="check every block before it is used (default), a few of each request, or none",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw hits, pool use and traffic to FILE.png"
    )
    runtime_choice.add_runtime_option(parser)
    parser.set_defaults(run=run)


class _UsageError(ValueError):
    pass


def _check_outputs(arguments: argparse.Namespace) -> None:
    """A run must not end in an error that could be seen before it began."""
    for option in ("json", "plot"):
        path: Path | None = getattr(arguments, option)
        if path is None:
            continue
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise _UsageError(f"--{option} {path}: not a file in a folder that exists")
    if arguments.plot is not None:
        if arguments.plot.suffix.lower() != ".png":
            raise _UsageError(f"--plot {arguments.plot}: the name must end in .png")
        if importlib.util.find_spec("matplotlib") is None:
            raise _UsageError("--plot needs matplotlib: pip install 'npu_kv_ops[plot]'")


def _requests(arguments: argparse.Namespace) -> tuple[list[Request], str]:
    if (arguments.trace is None) == (arguments.synthetic is None):
        raise _UsageError("give either TRACE or --synthetic N")
    if arguments.synthetic is not None:
        requests = synthetic_trace(arguments.synthetic, arguments.seed)[: arguments.requests]
        return requests, f"synthetic chats, seed {arguments.seed}"
    try:
        return read_trace(arguments.trace, arguments.requests), str(arguments.trace)
    except OSError as error:
        raise _UsageError(f"{arguments.trace}: {error.strerror or error}") from None


def _print_setup(
    console: Console,
    runtime: str,
    source: str,
    requests: int,
    model: KVModel,
    sizes: Sizes,
    arguments: argparse.Namespace,
) -> None:
    def chosen(name: str) -> str:
        return ", chosen here" if name in sizes.chosen else ""

    size = report.human_bytes
    shrunk = (
        f"{size(sizes.full_block_bytes)} a block, not shrunk"
        if sizes.shrink == 1
        else f"{size(sizes.full_block_bytes)} a block, shrunk {sizes.shrink} times to "
        f"{size(sizes.block_bytes)}"
    )
    kinds = " and ".join(tensor.name for tensor in model.tensors)
    for name, value in (
        ("runtime", f"{runtime}: {runtime_choice.DESCRIPTIONS[runtime]}"),
        ("trace", f"{source}: {requests:,} requests"),
        ("model", f"{model.name}: {model.layers} layers, {kinds} ({model.tensor_count} tensors)"),
        ("blocks", f"{arguments.block_tokens} tokens, {shrunk}{chosen('shrink')}"),
        (
            "device pool",
            f"{sizes.device_blocks:,} blocks, {size(sizes.device_bytes)}{chosen('device_blocks')}",
        ),
        (
            "host pool",
            f"{sizes.host_blocks:,} blocks, {size(sizes.host_bytes)}{chosen('host_blocks')}",
        ),
        ("backend", f"{arguments.backend}, up to {arguments.ahead} requests ahead"),
        ("policy", arguments.policy),
    ):
        console.print(f"{name:<12} {value}", highlight=False, markup=False, soft_wrap=True)


def _print_results(console: Console, replay: Replay, total: int, verify: str) -> None:
    totals = replay.totals
    table = Table(show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for name, value in report.table_rows(totals, total, verify):
        bad = name == "mismatches" and totals.mismatches
        table.add_row(name, value, style="bold red" if bad else None)
    console.print(table)
    if totals.mismatches:
        console.print("blocks with wrong content:", style="bold red")
        for mismatch in totals.first_mismatches[:_SHOWN_MISMATCHES]:
            console.print(f"  {mismatch}", highlight=False, markup=False, soft_wrap=True)
        hidden = totals.mismatches - min(_SHOWN_MISMATCHES, len(totals.first_mismatches))
        if hidden:
            console.print(f"  and {hidden:,} more", highlight=False)


def _why_nothing_moved(needs: Sequence[BlockNeed], block_tokens: int, policy: str) -> str:
    """Of a whole run without a load or a store, which says nothing about the copies."""
    if not any(need.keys for need in needs):
        return f"no prompt fills a block of {block_tokens} tokens: lower --block-tokens"
    if policy == "lazy":
        return "the device pool held every block: lower --device-blocks, or use --policy eager"
    return "the host pool had no room: raise --host-blocks"


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C only asks the run to stop between two requests; a second one interrupts at once."""
    asked = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        previous = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: nobody can press Ctrl-C there
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
        disable=not console.is_terminal,
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: 0 all blocks right, 1 wrong blocks or a failure, 2 usage, 130 Ctrl-C."""
    out, errors = Console(soft_wrap=False), Console(stderr=True)

    def complain(message: object) -> None:
        errors.print(f"npu-kv replay: {message}", highlight=False, markup=False, soft_wrap=True)

    try:
        _check_outputs(arguments)
        model = load_model(arguments.model)
        requests, source = _requests(arguments)
        block_map = BlockMap(arguments.block_tokens)
        needs = [block_map.need(request) for request in requests]
    except (_UsageError, ModelError, ValueError) as error:
        complain(error)
        return 2

    with _stop_on_interrupt() as stop:
        try:
            runtime = runtime_choice.choose(arguments.runtime)
            sizes = choose_sizes(
                model,
                arguments.block_tokens,
                requests,
                needs,
                free_memory(runtime),
                device_blocks=arguments.device_blocks,
                host_blocks=arguments.host_blocks,
                shrink=arguments.shrink,
            )
        except SizingError as error:
            complain(error)
            return 2
        except RuntimeError as error:
            complain(error)
            return 1
        _print_setup(out, runtime, source, len(requests), model, sizes, arguments)
        try:
            replay = Replay(
                model,
                block_map,
                sizes,
                policy=arguments.policy,
                verify=arguments.verify,
                runtime=runtime,
                backend=arguments.backend,
                ahead=arguments.ahead,
                seed=arguments.seed,
            )
        except (RuntimeError, MemoryError) as error:
            complain(f"no memory for the pools: {error}")
            return 1
        return _replay(arguments, replay, requests, needs, stop, out, errors, runtime)


def _replay(
    arguments: argparse.Namespace,
    replay: Replay,
    requests: list[Request],
    needs: list[BlockNeed],
    stop: Callable[[], bool],
    out: Console,
    errors: Console,
    runtime: str,
) -> int:
    complete, failure = False, None
    progress = _progress(errors)
    try:
        with progress:
            task = progress.add_task("replay", total=len(requests), state="")

            def advance() -> None:
                totals = replay.totals
                state = (
                    f"hits {totals.device_hits:,} device, {totals.host_hits:,} host; "
                    f"{totals.mismatches:,} mismatches"
                )
                progress.update(task, advance=1, state=state)

            complete = replay.run(
                requests, needs, speed=arguments.speed, progress=advance, stop=stop
            )
    except KeyboardInterrupt:
        pass
    except Exception as error:
        # What has been replayed until then is still worth seeing.
        failure = error
    _print_results(out, replay, len(requests), arguments.verify)
    if complete and not (replay.totals.loads or replay.totals.stores):
        reason = _why_nothing_moved(needs, arguments.block_tokens, arguments.policy)
        out.print(f"no block moved between the pools: {reason}", highlight=False, soft_wrap=True)
    try:
        if arguments.json is not None:
            report.write_json(arguments.json, replay.totals, runtime)
        if arguments.plot is not None:
            from npu_kv_ops.replay.plot import save_plot

            title = f"{arguments.trace or 'synthetic'}, {arguments.model}, {runtime}"
            save_plot(arguments.plot, replay.totals.samples, replay.sizes, title)
    except OSError as error:
        failure = failure or error
    if failure is not None:
        served = f"{replay.totals.requests:,} of {len(requests):,} requests"
        errors.print(
            f"npu-kv replay: failed after {served}: {type(failure).__name__}: {failure}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 1
    if not complete:
        errors.print(
            f"npu-kv replay: interrupted after {replay.totals.requests:,} of "
            f"{len(requests):,} requests",
            highlight=False,
        )
        return 130
    return 1 if replay.totals.mismatches else 0
