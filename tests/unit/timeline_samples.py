"""Timelines for tests of what is made of them."""

from __future__ import annotations

from hypothesis import strategies as st

from gemini.timeline.events import (
    LINKS,
    Fill,
    Operator,
    Phase,
    StepSpan,
    Timeline,
    Transfer,
    Update,
    Wait,
    WaitShare,
)

KIND_OF = {"h2d": "fetch", "d2h": "evict", "disk_read": "load", "disk_write": "spill"}
NAMES = st.text(max_size=20) | st.sampled_from(["</script><b>", "<!--DATA-->", "\u2028", '"\\', "&lt;"])
TIMES = st.lists(st.floats(0, 1e3), min_size=3, max_size=3).map(sorted)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Return a timeline with any names and any times in their order."""
    label, chunk = draw(NAMES), draw(st.integers(0, 3))
    asked, begin, end = draw(TIMES)
    link = draw(st.sampled_from(LINKS))
    times = [draw(TIMES) for _ in range(draw(st.integers(0, 4)))]
    transfers = [Transfer(KIND_OF[link], link, chunk, 4096, *three) for three in times]
    return Timeline(
        steps=(StepSpan(1, asked, end, draw(st.booleans())),),
        phases=(Phase("forward", asked, end),),
        operators=(Operator("forward", label, asked, begin, end),),
        waits=(Wait(label, asked, begin, (WaitShare(link, chunk, begin - asked),)),),
        transfers=tuple(transfers),
        updates=(Update(label, asked, end),),
        fills=(Fill(begin, 10, 0, 5, 20),),
        chunk_labels=tuple(draw(st.lists(NAMES, max_size=3))),
        budget_bytes={"device": 30, "host": 0, "disk": 7},
    )


def long_timeline(num_operators: int) -> Timeline:
    """Return one step of so many operators, each with a wait, a load and a change of DEVICE."""
    operators, waits, transfers, fills = [], [], [], []
    for index in range(num_operators):
        t = index * 1e-3
        operators.append(Operator("forward", f"layer {index % 50}", t, t + 4e-4, t + 9e-4, index))
        waits.append(Wait(f"layer {index % 50}", t, t + 3e-4, (WaitShare("disk_read", index % 50, 3e-4),)))
        transfers.append(Transfer("load", "disk_read", index % 50, 4096, t, t, t + 3e-4))
        fills.append(Fill(t, index % 7 << 20, 0, 50 << 20, 8 << 20))
    end = num_operators * 1e-3
    return Timeline(
        steps=(StepSpan(1, 0.0, end),),
        phases=(Phase("forward", 0.0, end),),
        operators=tuple(operators),
        waits=tuple(waits),
        transfers=tuple(transfers),
        fills=tuple(fills),
        chunk_labels=tuple(f"param of layer {index}" for index in range(50)),
        budget_bytes={"device": 8 << 20, "disk": 64 << 20},
    )
