"""Changes the ``forward`` of a module object by giving it a subclass of its class. Its identity, class name
and signature of ``forward`` stay.

A hook does not suffice: programs that call ``forward`` directly bypass it, and blocks with hooks are not
recomputed.
"""

from __future__ import annotations

import copyreg
import functools
from typing import Any

from torch import nn


def mix_in(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Put ``mixin``, with a ``forward`` that calls its base's, before the class of ``module``. Idempotent."""
    if not isinstance(module, mixin):
        module.__class__ = _mixed(mixin, type(module))  # type: ignore[arg-type]


def class_without_mixin(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had before :func:`mix_in`."""
    before: type[nn.Module] = type(module).__bases__[1]
    return before


def reduce_as(plain: type[nn.Module], module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Return the result of ``module.__reduce_ex__`` for an object of class ``plain``: programs that unpickle
    it do not have the subclass.
    """
    reduced: Any = plain.__reduce_ex__(module, protocol)
    function, arguments, *rest = reduced
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        function, arguments = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
    return (function, arguments, *rest)


@functools.cache
def _mixed(mixin: type[nn.Module], was: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(was.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    return type(was.__name__, (mixin, was), {"__module__": was.__module__, "forward": forward})
