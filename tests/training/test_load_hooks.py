"""Loading a state dict runs the hooks of modules as torch does, and leaves what torch leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from training_harness import KIB, assert_same_state, seeded, tight
from training_models import Around

from gemini import ConfigError, GeminiDDP

BOTH = pytest.mark.parametrize("precision", [None, "bf16"])


class Hooked(nn.Module):
    """A layer whose hooks of loading a test adds, with a list of what they saw."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        out: Tensor = self.fc(x)
        return out


class WithState(Hooked):
    """One whose extra state is about its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def get_extra_state(self) -> Tensor:
        """Return a number."""
        return torch.tensor(2.0)

    def set_extra_state(self, state: Tensor) -> None:
        """Note the number, a weight that is loaded before it, and one that is loaded after it."""
        self.seen.append((state.item(), self.scale[0].item(), self.fc.bias[0].item()))


def halves_what_it_loads() -> Hooked:
    model = Hooked()

    def halve(_module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
        state.update({k: v * 0.5 for k, v in state.items() if k.startswith(prefix)})

    model.fc.register_load_state_dict_pre_hook(halve)
    return model


def keeps_what_is_missing() -> Hooked:
    model = Hooked()
    model.fc.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *_: state.setdefault(prefix + "bias", module.bias)
    )
    return model


def looks_afterwards() -> Hooked:
    """The hook of a part sees the keys so far, as in torch, and the new weights."""
    model = Hooked()
    for part in (model, model.fc):
        part.register_load_state_dict_post_hook(
            lambda module, keys: model.seen.append((*map(list, keys), next(module.parameters()).sum().item()))
        )
    return model


def forgives() -> Hooked:
    model = Hooked()
    model.register_load_state_dict_post_hook(lambda _module, keys: keys.missing_keys.clear())
    return model


def exports_more() -> Hooked:
    model = Hooked()
    model.register_state_dict_post_hook(
        lambda _m, state, prefix, _meta: state.update({prefix + "more": torch.ones(2)})
    )
    return model


def normed() -> Hooked:
    model = Hooked()
    parametrizations.weight_norm(model.fc)
    return model


def normed_as_of_old() -> Hooked:
    model = Hooked()
    nn.utils.weight_norm(model.fc)
    return model


def _without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {name: value for name, value in state.items() if name != key}


def _as_it_is(state: dict[str, Any]) -> dict[str, Any]:
    return state


CASES: dict[str, tuple[Callable[[], Hooked], Callable[[], Hooked], Callable[[dict[str, Any]], Any], bool]] = {
    "converted": (halves_what_it_loads, Hooked, _as_it_is, True),
    "filled up": (keeps_what_is_missing, Hooked, _without("core.fc.bias"), True),
    "looked at": (looks_afterwards, Hooked, _as_it_is, True),
    "missing looked at": (looks_afterwards, Hooked, _without("core.fc.bias"), False),
    "forgiven": (forgives, Hooked, _without("core.fc.bias"), True),
    "not exported": (exports_more, Hooked, _as_it_is, True),
    "extra state": (WithState, WithState, _as_it_is, True),
    "old weight norm": (normed, normed_as_of_old, _as_it_is, True),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_hooks_of_loading_do_what_they_do_in_torch(case: str, on_disk: bool, tmp_path: Path) -> None:
    build, other, edit, strict = CASES[case]
    state = edit(seeded(lambda: Around(other()), 7).state_dict())
    plain, wrapped = seeded(lambda: Around(build())), seeded(lambda: Around(build()))
    want = plain.load_state_dict(state, strict)
    options = tight(tmp_path, 40 * KIB) if on_disk else {"device_bytes": "4MiB"}
    with GeminiDDP(wrapped, **options) as model:
        assert model.load_state_dict(state, strict) == want
        assert_same_state(model.state_dict(), plain.state_dict())
        assert wrapped.core.seen == plain.core.seen


def test_masters_take_what_hooks_make_before_any_cast(tmp_path: Path) -> None:
    model = seeded(lambda: Around(halves_what_it_loads()))
    other = seeded(lambda: Around(Hooked()), 7).state_dict()
    with GeminiDDP(model, mixed_precision="bf16", **tight(tmp_path, 40 * KIB)) as managed:
        managed.load_state_dict(other)
        assert torch.equal(managed.state_dict()["core.fc.weight"], other["core.fc.weight"] * 0.5)


def test_a_name_that_a_hook_fills_up_keeps_its_master(tmp_path: Path) -> None:
    model = seeded(lambda: Around(keeps_what_is_missing()))
    want = model.core.fc.bias.detach().clone()
    with GeminiDDP(model, mixed_precision="bf16", **tight(tmp_path, 40 * KIB)) as managed:
        managed.load_state_dict(_without("core.fc.bias")(seeded(lambda: Around(Hooked()), 7).state_dict()))
        assert torch.equal(managed.state_dict()["core.fc.bias"], want)


def _raises(*_arguments: Any) -> None:
    raise KeyError("a format that the hook does not know")


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception]]] = {
    "missing": (_without("after.0.bias"), RuntimeError),
    "shape": (lambda state: {**state, "after.0.bias": torch.zeros(3)}, ConfigError),
    "hook": (_as_it_is, KeyError),
}


@BOTH
def test_loading_what_the_module_itself_returned_changes_nothing_but_masters(
    precision: str | None, tmp_path: Path
) -> None:
    with GeminiDDP(
        seeded(lambda: Around(Hooked())), mixed_precision=precision, **tight(tmp_path, 40 * KIB)
    ) as model:
        want = {key: value.clone().float() for key, value in model.module.state_dict().items()}
        model.load_state_dict(model.module.state_dict())
        assert_same_state(model.state_dict(), want)


@BOTH
@pytest.mark.parametrize("case", BAD)
def test_a_load_that_fails_after_hooks_that_convert_changes_nothing(
    case: str, precision: str | None, tmp_path: Path
) -> None:
    edit, error = BAD[case]
    module = seeded(lambda: Around(halves_what_it_loads()))
    if case == "hook":
        module.after.register_load_state_dict_pre_hook(_raises)
    with GeminiDDP(module, mixed_precision=precision, **tight(tmp_path, 40 * KIB)) as model:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(error):
            model.load_state_dict(edit(seeded(lambda: Around(Hooked()), 7).state_dict()))
        assert_same_state(model.state_dict(), before)


def test_parameters_stay_managed_where_torch_would_exchange_them(tmp_path: Path) -> None:
    other = seeded(lambda: Around(Hooked()), 7).state_dict()
    with GeminiDDP(seeded(lambda: Around(Hooked())), **tight(tmp_path, 40 * KIB)) as model:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict(other)
            assert torch.__future__.get_swap_module_params_on_conversion()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert_same_state(model.state_dict(), other)


class Reader(Mapping[str, Tensor]):
    """A state that is read from somewhere at each use, and counts what of it is there at once."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self._state = state
        self._alive: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __getitem__(self, key: str) -> Tensor:
        gc.collect()
        value = self._state[key].clone()
        self._alive = [each for each in self._alive if each() is not None] + [weakref.ref(value)]
        self.most = max(self.most, len(self._alive))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def test_a_state_that_is_read_as_it_is_used_is_never_there_whole(tmp_path: Path) -> None:
    other = seeded(lambda: Around(Hooked()), 7).state_dict()
    reader = Reader(other)
    gc.collect()
    gc.freeze()  # Each read collects what this test left alone, not what the tests before it did.
    with GeminiDDP(seeded(lambda: Around(Hooked())), **tight(tmp_path, 40 * KIB)) as model:
        model.load_state_dict(reader)
        assert_same_state(model.state_dict(), other)
    assert reader.most <= 4 < len(other)


class Versioned(nn.Linear):
    """A layer that notes of which version the state is that it loads."""

    _version = 3

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.seen: list[Any] = []
        self.norm = nn.BatchNorm1d(32)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen.append(dict(metadata))
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        out: Tensor = self.norm(super().forward(x))
        return out


@pytest.mark.parametrize("is_known", [True, False])
def test_parts_of_a_wrapped_part_see_of_which_version_the_state_is(is_known: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"first": nn.Linear(4, 4), "part": Around(Versioned())})

    state = seeded(build, 7).state_dict()
    if not is_known:
        state = dict(state)  # without metadata; the norm's count may be missing then
        del state["part.core.norm.num_batches_tracked"]
    plain, outer = seeded(build), seeded(build)
    inner = outer["part"]
    with GeminiDDP(inner, **tight(tmp_path, 40 * KIB)) as outer["part"]:
        assert outer.load_state_dict(state) == plain.load_state_dict(state)
        assert_same_state(outer.state_dict(), plain.state_dict())
        assert inner.core.seen == plain["part"].core.seen == [{"version": 3} if is_known else {}]
