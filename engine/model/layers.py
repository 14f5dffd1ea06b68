"""Linear layers that know several equivalent forms of one product and use, for each batch size, the fastest.

Which form of y = x W^T is fast depends on batch size, shape and machine (by factors of two on CPUs), so `choose_forms` measures
at warm-up, on many weights in turn so that caches tell the truth. Forms need the weight in one of three stores; a
linear keeps one store, and a second one where it gains and the budget for copies allows.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

StoreName = Literal["rows", "columns", "packed"]
Product = Callable[[torch.Tensor], torch.Tensor]

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that are measured; others use the next larger one, all above the last use the last."""

SAMPLED_LINEARS = 6
REPETITIONS = 5
SECOND_STORE_GAIN = 0.03
"""A second store must save this share of the time, averaged over the measured batch sizes."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to compute the product from a weight kept in `store`."""

    name: str
    store: StoreName
    bind: Callable[[torch.Tensor, torch.Tensor | None], Product]


def _rows(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)


def _left(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """One row is made two: a product with two columns reads the weight at full speed, one with a vector does not."""

    def product(x: torch.Tensor) -> torch.Tensor:
        columns = (x if len(x) > 1 else F.pad(x, (0, 0, 0, 1))).t()
        turned = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
        return turned.t()[: len(x)].contiguous()

    return product


def _columns(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    if bias is None:
        return lambda x: x @ weight
    return lambda x: torch.addmm(bias, x, weight)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, weight, bias, "none", [], "")


ROWS = Form("x W^T", "rows", _rows)
LEFT = Form("(W x^T)^T", "rows", _left)
COLUMNS = Form("x (W^T)", "columns", _columns)
PACKED = Form("oneDNN packed", "packed", _packed)

PACKED_FOR_ROWS = 16
"""oneDNN chooses its blocking by an expected batch size; this one is good or best from 4 rows on."""


def _store(weight: torch.Tensor, name: StoreName) -> torch.Tensor:
    """`weight` [out, in] in another store; `rows` is the weight itself."""
    match name:
        case "rows":
            return weight
        case "columns":
            return weight.t().contiguous()
        case "packed":
            return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)  # type: ignore[no-any-return]


def available_forms(dtype: torch.dtype, device: torch.device) -> tuple[Form, ...]:
    if device.type != "cpu":
        return (ROWS,)
    packs = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if torch.backends.mkldnn.is_available() and packs:  # type: ignore[no-untyped-call]
        return (ROWS, LEFT, COLUMNS, PACKED)
    return (ROWS, LEFT, COLUMNS)


class Linear:
    """y = x W^T + b for x [T, in]; W [out, in]. Called with the row form until `use` has been called."""

    __slots__ = ("_products", "bias", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._products: list[Product] = [ROWS.bind(weight, bias)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        products = self._products
        size = (x.shape[0] - 1).bit_length()
        return products[size if size < len(products) else -1](x)

    def use(self, forms: Sequence[Form]) -> None:
        """One form for each of MEASURED_ROWS; stores that no form needs are let go."""
        assert self.weight is not None, "forms are chosen once"
        stores = {name: _store(self.weight, name) for name in dict.fromkeys(form.store for form in forms)}
        bound = {form.name: form.bind(stores[form.store], self.bias) for form in forms}
        self._products = [bound[form.name] for form in forms]
        self.weight = None


def choose_forms(
    linears: Iterable[Linear], copy_budget_bytes: int, dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Measure and set the forms of all linears, group by group of equal shape. Second stores take at most
    `copy_budget_bytes` in all. Returns one line of report a group."""
    groups: defaultdict[tuple[int, int, bool], list[Linear]] = defaultdict(list)
    for linear in linears:
        groups[linear.out_features, linear.in_features, linear.bias is not None].append(linear)
    forms = available_forms(dtype, device)
    report = []
    for (out_features, in_features, _), group in groups.items():
        group_bytes = len(group) * out_features * in_features * dtype.itemsize
        stores_limit = 2 if group_bytes <= copy_budget_bytes else 1
        chosen = (
            best_forms(_measure(group[:SAMPLED_LINEARS], forms, dtype), stores_limit) if len(forms) > 1 else list(forms)
        )
        stores = {form.store for form in chosen}
        copy_budget_bytes -= group_bytes * (len(stores) - 1)
        for linear in group:
            linear.use(chosen)
        by_size = ", ".join(f"{rows}: {form.name}" for rows, form in zip(MEASURED_ROWS, chosen, strict=False))
        report.append(f"{len(group)} of [{out_features}, {in_features}]: {by_size}")
    return report


def _measure(linears: Sequence[Linear], forms: Sequence[Form], dtype: torch.dtype) -> dict[Form, list[float]]:
    """Seconds of one pass over `linears` for each form and each of MEASURED_ROWS; least of a few repetitions, between which
    the forms take turns, so that a busy moment of the machine does not decide against one of them."""
    products = {
        form: [form.bind(_store(_weight(linear), form.store), linear.bias) for linear in linears] for form in forms
    }
    seconds: dict[Form, list[float]] = {form: [] for form in forms}
    for rows in MEASURED_ROWS:
        x = torch.randn(rows, linears[0].in_features).to(dtype)
        turns = [[_pass_seconds(products[form], x) for form in forms] for _ in range(REPETITIONS)]
        for form, best in zip(forms, np.min(turns, axis=0).tolist(), strict=True):
            seconds[form].append(best)
    return seconds


def _weight(linear: Linear) -> torch.Tensor:
    assert linear.weight is not None
    return linear.weight


def _pass_seconds(products: Sequence[Product], x: torch.Tensor) -> float:
    # One thread's own time is not blurred by other processes on the machine; with several threads only wall time counts all.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    products[0](x)
    started = clock()
    for product in products:
        product(x)
    return clock() - started


def best_forms(seconds: dict[Form, list[float]], stores_limit: int) -> list[Form]:
    """The fastest form for each measured size, from at most `stores_limit` stores. Each size counts alike (relative to its
    best), and each further store must gain SECOND_STORE_GAIN."""
    sizes = range(len(next(iter(seconds.values()))))
    fastest = [min(times[size] for times in seconds.values()) for size in sizes]
    stores = sorted({form.store for form in seconds})
    best_choice: list[Form] = []
    best_cost = float("inf")
    for count in range(1, stores_limit + 1):
        for subset in itertools.combinations(stores, count):
            usable = [form for form in seconds if form.store in subset]
            choice = [min(usable, key=lambda form: seconds[form][size]) for size in sizes]
            relative = sum(seconds[form][size] / fastest[size] for size, form in enumerate(choice)) / len(choice)
            cost = relative * (1 + SECOND_STORE_GAIN * (count - 1))
            if cost < best_cost:
                best_choice, best_cost = choice, cost
    return best_choice
