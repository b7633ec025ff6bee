"""What the compute operators of the simulated NPU are tested with: torch calls that lead to them.

A case is a function of tensors that runs unchanged on the CPU and on the NPU. Together the cases
reach every operator type that the simulator has (test_kernels_values checks that).
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

Tensors = tuple[torch.Tensor, ...]
Values = Callable[[torch.Generator, Sequence[int], torch.dtype], torch.Tensor]

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
WHOLE = (torch.int32, torch.int64)
BYTES = (torch.int8, torch.uint8)
NUMBERS = FLOATS + WHOLE + BYTES
ALL = (*NUMBERS, torch.bool)


def small(random: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Numbers around zero that every dtype holds exactly, so that no rounding hides a mistake."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    low = 0 if dtype == torch.uint8 else -6
    whole = torch.randint(low, 7, shape, generator=random)
    return (whole / 4).to(dtype) if dtype.is_floating_point else whole.to(dtype)


def positive(random: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """From 1/4 (whole numbers: 1) upwards."""
    whole = torch.randint(1, 9, shape, generator=random)
    return (whole / 4).to(dtype) if dtype.is_floating_point else whole.to(dtype)


def proper(random: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Inside (-1, 1)."""
    return (torch.randint(-7, 8, shape, generator=random) / 8).to(dtype)


def distinct(random: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """No value twice, so that an order or an extreme is unique."""
    count = 1
    for extent in shape:
        count *= extent
    return torch.randperm(count, generator=random).reshape(tuple(shape)).to(dtype)


@dataclass(frozen=True)
class Case:
    """One torch call.

    Attributes:
        name: unique among the cases.
        function: takes one tensor for each entry of ``arguments``; may change and return them.
        arguments: the shape of each tensor and how its values are made. A shape is a string of
            dimension names: the same letter is the same extent, ``*`` stands for any number of
            dimensions, a digit for itself.
        dtypes: of the first tensor and of all others that have no own one.
        own: a dtype for some of the tensors, by position.
        capture: whether torch_npu can capture the call.
        tolerance: relative and absolute, where it has to be larger than the dtype's.
        empty: whether a dimension may have no elements.
        scalars: numbers of which the function takes one, as its last argument.
    """

    name: str
    function: Callable[..., object]
    arguments: tuple[tuple[str, Values], ...]
    dtypes: tuple[torch.dtype, ...]
    own: tuple[tuple[int, torch.dtype], ...] = ()
    capture: bool = True
    tolerance: float = 0.0
    empty: bool = True
    scalars: tuple[float, ...] = ()

    def with_scalar(self, scalar: float) -> Case:
        """Return the case with one of its numbers filled in."""
        function = self.function
        return replace(self, function=lambda *tensors: function(*tensors, scalar), scalars=())

    def __str__(self) -> str:
        return self.name

    def tensors(
        self,
        random: torch.Generator,
        dtype: torch.dtype,
        leading: Sequence[int],
        extents: Sequence[int],
    ) -> list[torch.Tensor]:
        """Make the arguments: ``leading`` replaces ``*``, the letters take from ``extents``."""
        sizes = {letter: [extent] for letter, extent in zip(string.ascii_lowercase, extents)}
        sizes["*"] = list(leading)
        made = []
        for position, (shape, values) in enumerate(self.arguments):
            own = dict(self.own).get(position, dtype)
            wanted = [
                extent
                for letter in shape
                for extent in ([int(letter)] if letter.isdigit() else sizes[letter])
            ]
            made.append(values(random, wanted, own))
        return made


def compare(case: Case, dtype: torch.dtype, found: object, expected: object) -> None:
    """Fail unless both are the same, as far as the case's dtype can tell."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        # The dtypes differ where torch_npu's older operators sum in float32.
        tolerance = max(
            case.tolerance, {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-5)
        )
        torch.testing.assert_close(
            found.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
        )
    elif isinstance(expected, tuple):
        assert isinstance(found, tuple)
        for one, other in zip(found, expected, strict=True):
            compare(case, dtype, one, other)
    else:
        assert found == expected


def unary(
    name: str,
    function: Callable[..., object],
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    values: Values = small,
    **others: object,
) -> Case:
    return Case(name, function, (("*", values),), dtypes, **others)  # type: ignore[arg-type]


def binary(
    name: str,
    function: Callable[..., object],
    dtypes: tuple[torch.dtype, ...] = NUMBERS,
    values: Values = small,
    **others: object,
) -> list[Case]:
    """The second operand as large as the first, broadcast, and without dimensions."""
    shapes = {"same": ("*a", "*a"), "row": ("*ab", "b"), "column": ("*ab", "a1"), "one": ("*", "")}
    return [
        Case(f"{name}-{kind}", function, ((x, small), (y, values)), dtypes, **others)  # type: ignore[arg-type]
        for kind, (x, y) in shapes.items()
    ]


def index(limit: int) -> Values:
    def values(random: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, limit, tuple(shape), generator=random).to(dtype)

    return values


def unique_index(random: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randperm(4, generator=random)[: shape[0]].to(dtype)


# Whole, fractional, negative, zero, not finite: each dtype gets those that fit it.
HALF_STEPS = (2.0, -1.5, 0.0, 0.25, float("inf"))
STEPS = (3, 1, 0, 5)


def scalar(
    name: str, function: Callable[..., object], *, divides: bool = False, whole: bool = True
) -> list[Case]:
    """An operator with a number: a fractional one for floats, a whole one for the rest."""
    kinds = [("fraction", FLOATS, HALF_STEPS)]
    if whole:
        kinds.append(("whole", (torch.float32, *WHOLE), STEPS))
    return [
        unary(
            f"{name}-{kind}",
            function,
            dtypes,
            scalars=tuple(value for value in values if value or not divides),
        )
        for kind, dtypes, values in kinds
    ]


ELEMENTWISE = [
    *scalar("scalar-add", lambda x, s: x + s),
    *scalar("scalar-sub", lambda x, s: s - x),
    *scalar("scalar-mul", lambda x, s: x * s),
    *scalar("scalar-div", lambda x, s: x / s, divides=True),
    *scalar("scalar-floor", lambda x, s: x // s, divides=True, whole=False),
    *scalar("scalar-pow", lambda x, s: x.abs() ** s, whole=False),
    *scalar("scalar-eq", lambda x, s: x == s),
    *scalar("scalar-lt", lambda x, s: x < s),
    *scalar("scalar-ge", lambda x, s: x >= s),
    *scalar("scalar-clamp", lambda x, s: x.clamp(max=s)),
    *scalar("scalar-fill", lambda x, s: x.fill_(s)),
    *scalar("scalar-masked", lambda x, s: x.masked_fill(x > 0, s)),
    *scalar("scalar-where", lambda x, s: torch.where(x > 0, x, s)),
    *scalar("scalar-full", lambda x, s: torch.full_like(x, s)),
    *scalar("scalar-add-alpha", lambda x, s: torch.add(x, x, alpha=s)),
    *scalar("scalar-lerp", lambda x, s: torch.lerp(x, x.abs(), s), whole=False),
    unary("abs", torch.abs, (*FLOATS, torch.int32, torch.int64, torch.int8)),
    unary("acos", torch.acos, values=proper),
    unary("acosh", lambda x: torch.acosh(x + 1), values=positive),
    unary("asin", torch.asin, values=proper),
    unary("asinh", torch.asinh),
    unary("atan", torch.atan),
    unary("atanh", torch.atanh, values=proper),
    unary("ceil", torch.ceil),
    unary("cos", torch.cos),
    unary("cosh", torch.cosh),
    unary("erf", torch.erf),
    unary("erfc", torch.erfc),
    unary("erfinv", torch.erfinv, (torch.float32,), values=proper),
    unary("exp", torch.exp),
    unary("expm1", torch.expm1),
    unary("floor", torch.floor),
    unary("gelu", F.gelu, tolerance=2e-3),  # CANN's operator is the tanh approximation
    unary("gelu-tanh", lambda x: F.gelu(x, approximate="tanh")),
    unary("hardsigmoid", F.hardsigmoid),
    unary("hardswish", F.hardswish),
    unary("bitwise_not", torch.bitwise_not, (*WHOLE, *BYTES, torch.bool)),
    unary("isfinite", lambda x: torch.isfinite(1 / x)),
    unary("log", torch.log, values=positive),
    unary("log2", torch.log2, values=positive),
    unary("log10", torch.log10, values=positive),
    unary("log1p", torch.log1p, values=positive),
    unary("logsigmoid", F.logsigmoid),
    unary("logical_not", torch.logical_not, ALL),
    unary("mish", F.mish),
    unary("neg", torch.neg, (*FLOATS, *WHOLE)),
    unary("reciprocal", torch.reciprocal, values=positive),
    unary("relu", torch.relu),
    unary("round", torch.round),
    unary("rsqrt", torch.rsqrt, values=positive),
    unary("sigmoid", torch.sigmoid),
    unary("sign", torch.sign, (*FLOATS, *WHOLE)),
    unary("sin", torch.sin),
    unary("sinh", torch.sinh),
    unary("sqrt", torch.sqrt, values=positive),
    unary("square", torch.square, (*FLOATS, *WHOLE)),
    unary("silu", F.silu),
    unary("tan", torch.tan),
    unary("tanh", torch.tanh),
    unary("trunc", torch.trunc),
    unary("elu", lambda x: F.elu(x, alpha=0.5)),
    unary("leaky_relu", lambda x: F.leaky_relu(x, 0.25)),
    unary("softplus", lambda x: F.softplus(x, beta=2)),
    unary("threshold", lambda x: F.threshold(x, 0.25, -2.0)),
    unary(
        "nan_to_num", lambda x: torch.nan_to_num(x.log(), nan=2.0, neginf=-3.0), (torch.float32,)
    ),
    unary("pow-3", lambda x: x**3),
    unary("pow-half", lambda x: x**0.5, values=positive),
    unary("pow-base", lambda x: 2**x),
    unary("add-number", lambda x: x + 1.5),
    unary("add-whole", lambda x: x + 3, NUMBERS),
    unary("subtract-from", lambda x: 2.5 - x),
    unary("divide-number", lambda x: x / 3),
    unary("divide-into", lambda x: 2 / x, values=positive),
    unary("multiply-number", lambda x: x * -2, (*FLOATS, *WHOLE)),
    unary("clamp", lambda x: x.clamp(-0.5, 0.75)),
    unary("clamp-one-side", lambda x: x.clamp(min=0), (torch.float32, *WHOLE)),
    unary("hardtanh", lambda x: F.hardtanh(x, -0.5, 1.0)),
    unary("in-place", lambda x: x.add_(1).mul_(2), (*FLOATS, *WHOLE)),
    unary("less-than-number", lambda x: x < 1, NUMBERS),
    unary("equal-number", lambda x: x == 1, NUMBERS),
    unary("isnan", lambda x: torch.isnan(x.log())),
    unary("shift-left", lambda x: x << 2, WHOLE, positive),
    unary("shift-right", lambda x: x >> 1, WHOLE, positive),
    unary("and-number", lambda x: x & 5, WHOLE),
    Case("glu", lambda x: F.glu(x, -1), (("*a4", small),), (torch.float32,), empty=False),
    *binary("add", torch.add),
    *binary("sub", torch.sub),
    *binary("mul", torch.mul),
    *binary("div", torch.div, FLOATS, positive),
    *binary("floor_divide", torch.floor_divide, (torch.float32, *WHOLE), positive),
    *binary("remainder", torch.remainder, (torch.float32, *WHOLE), positive),
    *binary("fmod", torch.fmod, (torch.float32, *WHOLE), positive),
    *binary("pow", lambda x, y: x.abs().pow(y), (torch.float32,), positive),
    *binary("maximum", torch.maximum, (*FLOATS, *WHOLE)),
    *binary("minimum", torch.minimum, (*FLOATS, *WHOLE)),
    *binary("atan2", torch.atan2, FLOATS),
    *binary("eq", torch.eq, ALL),
    *binary("ne", torch.ne, ALL),
    *binary("lt", torch.lt),
    *binary("le", torch.le),
    *binary("gt", torch.gt),
    *binary("ge", torch.ge),
    # torch_npu reads an operand without dimensions back to the host.
    *(
        replace(case, capture=not case.name.endswith("one"))
        for case in binary("logical_and", torch.logical_and, ALL)
    ),
    *binary("logical_or", torch.logical_or, ALL),
    *binary("bitwise_and", torch.bitwise_and, (*WHOLE, torch.bool)),
    *binary("bitwise_or", torch.bitwise_or, (*WHOLE, torch.bool)),
    *binary("bitwise_xor", torch.bitwise_xor, (*WHOLE, torch.bool)),
    *binary("xlogy", torch.xlogy, (torch.float32,), positive),
    *binary("add-alpha", lambda x, y: torch.add(x, y, alpha=3), (*FLOATS, *WHOLE)),
    *binary("isclose", lambda x, y: torch.isclose(x, y, atol=0.3), (torch.float32,)),
    *binary("copy", lambda x, y: x.copy_(y.expand_as(x)), ALL),
    Case("lerp", torch.lerp, (("*a", small), ("*a", small), ("*a", small)), (torch.float32,)),
    Case("lerp-number", lambda x, y: torch.lerp(x, y, 0.25), (("*", small),) * 2, FLOATS),
    Case(
        "addcmul",
        lambda x, y, z: torch.addcmul(x, y, z, value=2),
        (("*", small),) * 3,
        FLOATS,
    ),
    Case(
        "addcdiv",
        lambda x, y, z: torch.addcdiv(x, y, z, value=2),
        (("*", small), ("*", small), ("*", positive)),
        FLOATS,
    ),
    Case(
        "clamp-tensors",
        lambda x, low: torch.clamp(x, low, low + 1),
        (("*a", small), ("*a", small)),
        (torch.float32,),
    ),
    Case(
        "masked_fill",
        lambda x, mask: x.masked_fill(mask, 5),
        (("*ab", small), ("*ab", small)),
        ALL,
        own=((1, torch.bool),),
    ),
    Case(
        "masked_fill-broadcast",
        lambda x, mask: x.masked_fill_(mask, float("-inf")),
        (("*ab", small), ("a1", small)),
        FLOATS,
        own=((1, torch.bool),),
    ),
    Case(
        "where",
        torch.where,
        (("*ab", small), ("*ab", small), ("*ab", small)),
        NUMBERS,
        own=((0, torch.bool),),
    ),
    Case(
        "where-broadcast",
        lambda mask, x: torch.where(mask, x, 0.5),
        (("ab", small), ("1b", small)),
        FLOATS,
        own=((0, torch.bool),),
    ),
    Case("mse_loss", F.mse_loss, (("*ab", small), ("*ab", small)), (torch.float32,), empty=False),
    Case(
        "mse_loss-none",
        lambda x, y: F.mse_loss(x, y, reduction="none"),
        (("*ab", small), ("*ab", small)),
        (torch.float32,),
    ),
]

CONVERSIONS = [
    unary(
        f"to-{str(dtype).removeprefix('torch.')}", lambda x, dtype=dtype: x.to(dtype), ALL, positive
    )
    for dtype in ALL
]


def reduction(
    name: str,
    function: Callable[..., object],
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    values: Values = small,
    **others: object,
) -> Case:
    return Case(name, function, (("*ab", values),), dtypes, **{"empty": False, **others})  # type: ignore[arg-type]


REDUCTIONS = [
    reduction("sum", lambda x: x.sum(), (*NUMBERS, torch.bool)),
    reduction("sum-dim", lambda x: x.sum(-1), (*FLOATS, *WHOLE)),
    reduction("sum-dims-kept", lambda x: x.sum((0, -1), keepdim=True)),
    reduction("mean", lambda x: x.mean()),
    reduction("mean-dim", lambda x: x.mean(-1, keepdim=True)),
    reduction("prod", lambda x: x.prod(-2), (torch.float32,), positive),
    reduction("prod-all", lambda x: x.prod(), (torch.float32,), positive, tolerance=1e-4),
    reduction("max-all", lambda x: x.max(), (*FLOATS, *WHOLE)),
    reduction("min-all", lambda x: x.min(), (*FLOATS, *WHOLE)),
    reduction("amax", lambda x: x.amax((-2, -1))),
    reduction("amin", lambda x: x.amin(0, keepdim=True)),
    reduction("max-dim", lambda x: tuple(x.max(-1)), (torch.float32,), distinct),
    reduction("min-dim", lambda x: tuple(x.min(0, keepdim=True)), (torch.float32,), distinct),
    reduction("argmax", lambda x: x.argmax(-1), FLOATS, distinct),
    reduction("argmax-all", lambda x: x.argmax(), (torch.float32,), distinct),
    reduction("argmin", lambda x: x.argmin(0, keepdim=True), (torch.float32,), distinct),
    reduction("all", lambda x: x.all(), (torch.bool, torch.float32, torch.int64)),
    reduction("all-dim", lambda x: x.all(-1), (torch.bool,)),
    reduction("any", lambda x: x.any(), (torch.bool,)),
    reduction("any-dim", lambda x: x.any(0, keepdim=True), (torch.bool,)),
    reduction("logsumexp", lambda x: x.logsumexp(-1), (torch.float32,)),
    reduction("var", lambda x: torch.cat((x, x + 1)).var(0), (torch.float32,), tolerance=1e-4),
    reduction(
        "var-population",
        lambda x: x.var(-1, unbiased=False, keepdim=True),
        (torch.float32,),
        tolerance=1e-4,
    ),
    reduction("std", lambda x: torch.cat((x, x + 1)).std(), (torch.float32,), tolerance=1e-4),
    reduction("std-dim", lambda x: torch.cat((x, x + 1)).std(0), (torch.float32,), tolerance=1e-4),
    reduction("norm", lambda x: x.norm(), (torch.float32,)),
    reduction("norm-1", lambda x: x.norm(p=1, dim=-1), (torch.float32,)),
    reduction("norm-3", lambda x: x.norm(p=3, dim=0, keepdim=True), (torch.float32,)),
    reduction("norm-0", lambda x: x.norm(p=0, dim=-1), (torch.float32,)),
    reduction("norm-infinite", lambda x: x.norm(p=float("inf")), (torch.float32,)),
    reduction("cumsum", lambda x: x.cumsum(-1), (*FLOATS, torch.int64)),
    reduction("cumsum-first", lambda x: x.cumsum(0), (torch.float32, torch.int64)),
    reduction("cumprod", lambda x: x.cumprod(-1), (torch.float32,), positive),
    reduction("cummax", lambda x: tuple(x.cummax(-1)), (torch.float32,), distinct),
    reduction("cummin", lambda x: tuple(x.cummin(0)), (torch.float32,), distinct),
    reduction("topk", lambda x: tuple(x.topk(1)), (*FLOATS, torch.int64), distinct),
    reduction(
        "topk-smallest",
        lambda x: tuple(x.topk(x.shape[0], dim=0, largest=False)),
        (torch.float32,),
        distinct,
    ),
    reduction("sort", lambda x: tuple(x.sort(-1)), (torch.float32, torch.float16), distinct),
    reduction("sort-down", lambda x: tuple(x.sort(0, descending=True)), (torch.float32,), distinct),
    reduction("argsort", lambda x: x.argsort(-1), (torch.float32,), distinct),
    reduction("trace", lambda x: x.flatten(0, -2).trace(), (torch.float32,)),
    reduction("unique", torch.unique, (torch.int64,), capture=False),
    reduction(
        "unique-all",
        lambda x: torch.unique(x, return_inverse=True, return_counts=True),
        (torch.int64,),
        capture=False,
    ),
    reduction(
        "bincount", lambda x: x.flatten().bincount(), (torch.int64,), index(5), capture=False
    ),
    Case(
        "searchsorted",
        lambda x, y: torch.searchsorted(x.sort().values, y, right=True),
        (("a", distinct), ("*b", small)),
        (torch.float32,),
    ),
    Case(
        "bucketize",
        lambda x, y: torch.bucketize(y, x.sort().values),
        (("a", distinct), ("*b", small)),
        (torch.float32,),
    ),
    Case("equal", torch.equal, (("*a", small), ("*a", small)), ALL, capture=False, empty=False),
]

MATRICES = [
    Case("mm", lambda x, y: x @ y, (("ab", small), ("bc", small)), FLOATS),
    Case("mm-transposed", lambda x, y: x @ y.t(), (("ab", small), ("cb", small)), FLOATS),
    Case("mm-both", lambda x, y: x.t() @ y.t(), (("ba", small), ("cb", small)), (torch.float32,)),
    Case("mv", lambda x, y: x @ y, (("ab", small), ("b", small)), (torch.float32,), empty=False),
    Case("linear", F.linear, (("*ab", small), ("cb", small)), FLOATS, empty=False),
    Case(
        "linear-bias",
        F.linear,
        (("ab", small), ("cb", small), ("c", small)),
        FLOATS,
        empty=False,
    ),
    Case(
        "addmm",
        torch.addmm,
        (("c", small), ("ab", small), ("bc", small)),
        (torch.float32,),
        empty=False,
    ),
    Case("bmm", torch.bmm, (("abc", small), ("acd", small)), FLOATS, empty=False),
    Case(
        "bmm-transposed",
        lambda x, y: x @ y.transpose(-1, -2),
        (("abc", small), ("adc", small)),
        FLOATS,
        empty=False,
    ),
    Case(
        "matmul-broadcast",
        lambda x, y: x @ y,
        (("abcd", small), ("bde", small)),
        (torch.float32,),
        empty=False,
    ),
    Case("dot", torch.dot, (("a", small), ("a", small)), (torch.float32,), empty=False),
    Case(
        "einsum",
        lambda x, y: torch.einsum("bij,bkj->bik", x, y),
        (("abc", small), ("adc", small)),
        (torch.float32,),
        empty=False,
    ),
]

NORMALISATIONS = [
    reduction("softmax", lambda x: x.softmax(-1)),
    reduction("softmax-first", lambda x: x.softmax(0), (torch.float32,)),
    reduction("softmax-wide", lambda x: x.softmax(-1, dtype=torch.float32), HALVES),
    reduction("log_softmax", lambda x: x.log_softmax(-1)),
    Case(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        (("*ab", small), ("b", small), ("b", small)),
        FLOATS,
        tolerance=1e-4,
        empty=False,
    ),
    Case(
        "layer_norm-two-dims",
        lambda x: F.layer_norm(x, x.shape[-2:]),
        (("a*bc", small),),
        (torch.float32,),
        tolerance=1e-4,
        empty=False,
    ),
    Case(
        "rms_norm",
        lambda x, w: F.rms_norm(x, w.shape, w, eps=1e-5),
        (("*ab", small), ("b", small)),
        (torch.float32,),
        tolerance=1e-4,
        empty=False,
    ),
    Case(
        "group_norm",
        lambda x, w: F.group_norm(torch.cat((x, x * 2 + 1), 1), 2, torch.cat((w, w))),
        (("ab3", small), ("b", small)),
        (torch.float32,),
        tolerance=1e-3,
        empty=False,
    ),
    Case(
        "cross_entropy",
        F.cross_entropy,
        (("ab", small), ("a", index(1))),
        (torch.float32,),
        own=((1, torch.int64),),
        empty=False,
    ),
    Case(
        "nll_loss-none",
        lambda x, y: F.nll_loss(x, y, reduction="none"),
        (("ab", small), ("a", index(1))),
        (torch.float32,),
        own=((1, torch.int64),),
        empty=False,
    ),
]


def fused(operator: str, reference: Callable[..., object]) -> Callable[..., object]:
    """An operator of torch_npu on the NPU, what it means on the CPU."""

    def either(*tensors: torch.Tensor) -> object:
        if tensors[0].device.type == "cpu":
            return reference(*tensors)
        import torch_npu

        return getattr(torch_npu, operator)(*tensors)

    return either


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    root = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return (x * root * weight).to(x.dtype), root


def add_rms_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> Tensors:
    return (*rms_norm(x + y, weight), x + y)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def layer_norm_eval(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return F.layer_norm(x, w.shape, w, b)
    import torch_npu

    return torch_npu.npu_layer_norm_eval(x, list(w.shape), w, b)


FUSED = [
    Case(
        "npu_rms_norm",
        fused("npu_rms_norm", rms_norm),
        (("*ab", positive), ("b", small)),
        (torch.float32,),
        empty=False,
    ),
    Case(
        "npu_add_rms_norm",
        fused("npu_add_rms_norm", add_rms_norm),
        (("*ab", positive), ("*ab", positive), ("b", small)),
        (torch.float32,),
        empty=False,
    ),
    Case(
        "npu_rotary_mul",
        fused("npu_rotary_mul", rotary),
        # A head of 64 is one operator, a small one is not.
        (("abc4", small), ("11c4", small), ("11c4", small)),
        (torch.float32,),
        empty=False,
    ),
    Case(
        "npu_rotary_mul-64",
        lambda *xs: fused("npu_rotary_mul", rotary)(*(x.repeat(1, 1, 1, 16) for x in xs)),
        (("abc4", small), ("11c4", small), ("11c4", small)),
        (torch.float32,),
        empty=False,
    ),
    Case(
        "npu_layer_norm_eval",
        layer_norm_eval,
        (("*ab", small), ("b", small), ("b", small)),
        (torch.float32,),
        tolerance=1e-4,
        empty=False,
    ),
]

SHAPES = [
    Case("clone-transposed", lambda x: x.transpose(-1, -2).contiguous(), (("*ab", small),), ALL),
    Case("permute", lambda x: x.permute(2, 0, 1).reshape(-1), (("abc", small),), ALL),
    Case("slice-columns", lambda x: x[..., :1].contiguous(), (("*ab", small),), ALL, empty=False),
    Case("slice-step", lambda x: x[::2].contiguous(), (("a*b", small),), ALL, empty=False),
    Case(
        "select-column", lambda x: x[..., 0] * 2, (("*ab", small),), (*FLOATS, *WHOLE), empty=False
    ),
    # A dimension is left out of the result: `shrink_axis_mask`.
    Case("select-middle", lambda x: x[:, -1].contiguous(), (("abc", small),), ALL, empty=False),
    Case("expand", lambda x: x.expand(3, *x.shape).contiguous(), (("*a", small),), ALL),
    Case(
        "expand-middle", lambda x: x[:, None].expand(-1, 2, -1).reshape(-1), (("ab", small),), ALL
    ),
    Case("repeat", lambda x: x.repeat(2, *[1] * x.dim()), (("*a", small),), ALL),
    Case("cat", lambda x, y: torch.cat((x, y, x)), (("ac", small), ("bc", small)), ALL),
    Case("cat-last", lambda x, y: torch.cat((x, y), -1), (("*ab", small), ("*ac", small)), ALL),
    Case("stack", lambda x, y: torch.stack((x, y), -1), (("*a", small), ("*a", small)), ALL),
    Case(
        "pad",
        lambda x: F.pad(x, (1, 2, 0, 1), value=3),
        (("*ab", small),),
        (*FLOATS, *WHOLE),
        empty=False,
    ),
    Case("flip", lambda x: x.flip(0, -1), (("*ab", small),), ALL, empty=False),
    Case("roll", lambda x: x.roll((1, 2), (0, -1)), (("*ab", small),), NUMBERS, empty=False),
    Case("roll-flat", lambda x: x.roll(3), (("*ab", small),), (torch.float32,), empty=False),
    Case("tril", lambda x: x.tril(), (("*ab", small),), NUMBERS, empty=False),
    Case("triu", lambda x: x.triu(1), (("*ab", small),), (torch.float32, torch.bool), empty=False),
    Case(
        "repeat_interleave",
        lambda x: x.repeat_interleave(2, 0),
        (("a*b", small),),
        FLOATS,
        empty=False,
    ),
    Case("zeros_like", lambda x: torch.zeros_like(x), (("*", small),), ALL),
    Case("ones_like", lambda x: torch.ones_like(x), (("*", small),), ALL),
    Case("full_like", lambda x: torch.full_like(x, 3), (("*", small),), ALL),
    Case(
        "arange",
        lambda x: torch.arange(x.shape[0], device=x.device),
        (("a", small),),
        (torch.int64,),
    ),
    Case(
        "arange-float",
        lambda x: x + torch.arange(1, 8, 0.5, device=x.device)[: x.shape[0]],
        (("a", small),),
        (torch.float32,),
    ),
    Case(
        "linspace",
        lambda x: torch.linspace(-1, 2, x.shape[0], device=x.device),
        (("a", small),),
        (torch.float32,),
    ),
    Case(
        "eye",
        lambda x: torch.eye(*x.shape, device=x.device),
        (("ab", small),),
        (torch.float32,),
        empty=False,
    ),
]

WRITES = [
    unary("fill", lambda x: x.fill_(2), ALL),
    unary("zero", lambda x: x.zero_(), ALL),
    Case("copy-row", lambda x, y: x[0].copy_(y), (("ab", small), ("b", small)), ALL, empty=False),
    Case(
        "copy-column",
        lambda x, y: x[:, 0].copy_(y),
        (("ab", small), ("a", small)),
        ALL,
        empty=False,
    ),
    Case(
        "copy-block",
        lambda x, y: x[..., 1:].copy_(y[..., 1:]),
        (("*ab", small), ("*ab", small)),
        ALL,
    ),
    Case("copy-transposed", lambda x, y: x.t().copy_(y), (("ab", small), ("ba", small)), ALL),
    Case(
        "copy-converted",
        lambda x, y: x[..., ::2].copy_(y[..., ::2]),
        (("*ab", small), ("*ab", positive)),
        NUMBERS,
        own=((1, torch.float32),),
    ),
    Case("set-number", lambda x: set_first_column(x, 2), (("*ab", small),), NUMBERS, empty=False),
    Case("add-to-part", lambda x: x[..., ::2].add_(1), (("*ab", small),), (*FLOATS, *WHOLE)),
]


def set_first_column(x: torch.Tensor, value: float) -> torch.Tensor:
    x[..., 0] = value
    return x


def set_rows(x: torch.Tensor, rows: torch.Tensor, values: object) -> torch.Tensor:
    x[rows] = values  # type: ignore[assignment]
    return x


ROWS, IDS = ("4*b", small), ("a", index(4))

INDEXING = [
    Case(
        "index_select", lambda x, i: x.index_select(0, i), (ROWS, IDS), ALL, own=((1, torch.int64),)
    ),
    Case(
        "index_select-last",
        lambda x, i: x.index_select(-1, i),
        (("*b4", small), IDS),
        ALL,
        own=((1, torch.int32),),
    ),
    Case(
        "embedding",
        lambda x, i: F.embedding(i, x),
        (("4b", small), ("*a", index(4))),
        FLOATS,
        own=((1, torch.int64),),
        empty=False,
    ),
    Case(
        "take",
        torch.take,
        (ROWS, ("*a", index(4))),
        (torch.float32,),
        own=((1, torch.int64),),
        empty=False,
    ),
    Case("index", lambda x, i: x[i], (ROWS, ("*a", index(4))), ALL, own=((1, torch.int64),)),
    Case("index-negative", lambda x, i: x[i - 4], (ROWS, IDS), FLOATS, own=((1, torch.int64),)),
    Case("index-second", lambda x, i: x[:, i], (("b4c", small), IDS), ALL, own=((1, torch.int64),)),
    Case("index-two", lambda x, i: x[i, i], (("44b", small), IDS), ALL, own=((1, torch.int64),)),
    Case(
        "index-apart",
        lambda x, i: x[i, :, i],
        (("4b4", small), IDS),
        FLOATS,
        own=((1, torch.int64),),
    ),
    Case(
        "index-grid",
        lambda x, i: x[i[:, None], i[None]],
        (("44b", small), IDS),
        FLOATS,
        own=((1, torch.int64),),
    ),
    Case(
        "index-mask",
        lambda x, m: x[m],
        (("*ab", small), ("*ab", small)),
        ALL,
        own=((1, torch.bool),),
        capture=False,
    ),
    Case(
        "index-mask-rows",
        lambda x, m: x[m],
        (("4b", small), ("4", small)),
        ALL,
        own=((1, torch.bool),),
        capture=False,
    ),
    Case(
        "gather",
        lambda x, i: x.gather(-1, i),
        (("*b4", small), ("*ba", index(4))),
        ALL,
        own=((1, torch.int64),),
    ),
    Case(
        "gather-first",
        lambda x, i: x.gather(0, i),
        (("4b", small), ("ab", index(4))),
        ALL,
        own=((1, torch.int64),),
    ),
    Case(
        "scatter",
        lambda x, i, y: x.scatter(0, i[:, None].expand_as(y), y),
        (("4b", small), ("a", unique_index), ("ab", small)),
        (*FLOATS, *WHOLE),
        own=((1, torch.int64),),
    ),
    Case(
        "scatter-number",
        lambda x, i: x.scatter_(-1, i, 5),
        (("*b4", small), ("*ba", index(4))),
        (*FLOATS, *WHOLE),
        own=((1, torch.int64),),
    ),
    Case(
        "scatter_add",
        lambda x, i, y: x.scatter_add_(-1, i, y),
        (("*b4", small), ("*ba", index(4)), ("*ba", small)),
        (torch.float32,),
        own=((1, torch.int64),),
    ),
    Case(
        "index_put",
        lambda x, i, y: x.index_put_((i,), y),
        (ROWS, ("a", unique_index), ("a*b", small)),
        ALL,
        own=((1, torch.int64),),
    ),
    Case(
        "index_put-two",
        lambda x, i, y: x.index_put_((i, i), y),
        (("44b", small), ("a", unique_index), ("ab", small)),
        (*FLOATS, *WHOLE),
        own=((1, torch.int64),),
    ),
    Case(
        "index_put-accumulate",
        lambda x, i, y: x.index_put_((i,), y, accumulate=True),
        (ROWS, IDS, ("a*b", small)),
        (torch.float32, torch.int64),
        own=((1, torch.int64),),
    ),
    Case(
        "set-rows",
        set_rows,
        (ROWS, ("a", unique_index), ("", small)),
        (*FLOATS, *WHOLE),
        own=((1, torch.int64),),
    ),
    Case(
        "set-second",
        lambda x, i: x.index_put_((slice_all(x), i), x.new_full((), 2)),
        (("b4", small), IDS),
        FLOATS,
        own=((1, torch.int64),),
    ),
    Case(
        "set-mask",
        lambda x, m: set_rows(x, m, 1.5),
        (("*ab", small), ("*ab", small)),
        FLOATS,
        own=((1, torch.bool),),
        capture=False,
    ),
    Case(
        "index_add",
        lambda x, i, y: x.index_add_(0, i, y, alpha=2),
        (ROWS, IDS, ("a*b", small)),
        (torch.float32, torch.int32),
        own=((1, torch.int64),),
    ),
    Case(
        "index_copy",
        lambda x, i, y: x.index_copy_(0, i, y),
        (ROWS, ("a", unique_index), ("a*b", small)),
        (*FLOATS, *WHOLE),
        own=((1, torch.int64),),
        capture=False,
        empty=False,
    ),
    Case(
        "index_fill",
        lambda x, i: x.index_fill_(0, i, 3),
        (ROWS, IDS),
        (torch.float32,),
        own=((1, torch.int64),),
        capture=False,
        empty=False,
    ),
    Case(
        "put",
        lambda x, i, y: x.put_(i, y),
        (("4", small), ("a", unique_index), ("a", small)),
        (torch.float32,),
        own=((1, torch.int64),),
        empty=False,
    ),
    Case(
        "put-accumulate",
        lambda x, i, y: x.put_(i, y, accumulate=True),
        (("4", small), IDS, ("a", small)),
        (torch.float32,),
        own=((1, torch.int64),),
        empty=False,
    ),
    Case(
        "one_hot",
        lambda i: F.one_hot(i, 4),
        (("*a", index(4)),),
        (torch.int64,),
        capture=False,
        empty=False,
    ),
    Case("nonzero", lambda x: x.nonzero(), (("*ab", small),), ALL, capture=False),
    Case("where-places", lambda x: torch.where(x), (("*ab", small),), (torch.bool,), capture=False),
    Case(
        "masked_select",
        lambda x, m: x.masked_select(m),
        (("*ab", small), ("*ab", small)),
        ALL,
        own=((1, torch.bool),),
        capture=False,
    ),
    Case(
        "masked_scatter",
        lambda x, m, y: x.masked_scatter(m, y),
        (("*ab", small), ("*ab", small), ("*ab", small)),
        (torch.float32,),
        own=((1, torch.bool),),
    ),
]


def slice_all(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device)[:, None]


CASES: list[Case] = [
    *ELEMENTWISE,
    *CONVERSIONS,
    *REDUCTIONS,
    *MATRICES,
    *NORMALISATIONS,
    *FUSED,
    *SHAPES,
    *WRITES,
    *INDEXING,
]
