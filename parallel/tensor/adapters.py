"""LoRA in a model that is cut: its matrices go with the layer that they are beside.

A layer W becomes W + B A. Beside a column layer A is whole and B is cut by outputs as W is; beside a row
layer A is cut by inputs as W is, and B is whole. What goes over the network more has the width of the rank r.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.tensor.styles import Column, Head, Row, Style


def styles_of_adapted(name: str, layer: nn.Module, style: Style) -> dict[str, Style] | None:
    """Return the styles of the parts of ``layer`` by their names, where PEFT put it around the module that
    ``style`` was for; else None.

    Raises:
        ConfigError: its adapters are of another kind.
    """
    adapted: Any = layer
    base = getattr(adapted, "base_layer", None)
    if not isinstance(base, nn.Module):
        return None
    kinds = {kind for kind in getattr(adapted, "adapter_layer_names", ()) if len(getattr(adapted, kind, ()))}
    others = sorted(kinds - {"lora_A", "lora_B"})
    if others:
        raise ConfigError(
            f"adapters of {', '.join(others)} are not cut; use LoRA around linear layers, without DoRA, or "
            "leave tp_size at 1"
        )
    if isinstance(style, Column) and style.square:
        style = style.as_sections(base)
    found: dict[str, Style] = {f"{name}.base_layer": style}
    if isinstance(style, Column | Head):
        found |= {f"{name}.lora_B.{key}": style for key in getattr(adapted, "lora_B", ())}
    elif isinstance(style, Row):
        found |= {f"{name}.lora_A.{key}": style for key in getattr(adapted, "lora_A", ())}
    else:
        raise ConfigError(f"LoRA around a layer of the style {type(style).__name__} is not cut; adapt others")
    return found
