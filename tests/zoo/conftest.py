"""Settings of the zoo, and the option to write its page."""

from __future__ import annotations

import os

import pytest
import torch
from catalogue import rows, rows_of_run
from page import WRITE, PageWriter

# Nothing is looked up in a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# The models of every run over ranks: experts that a rank may not use, gradients with other strides, modules
# that keep their weights in lists of their own.
FEW = ("Mixtral", "ConvNeXt", "nn.LSTM")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where ``tests/zoo`` is among the arguments of pytest."""
    parser.addoption(WRITE, action="store_true", help="write docs/zoo.md rather than compare with it")


def pytest_configure(config: pytest.Config) -> None:
    """Write the page in the process that sees all results."""
    if config.getoption(WRITE, default=False) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(PageWriter())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Take all models, or those of every run, with a third of the others if a day is given; over ranks all,
    or a few."""
    if "row" in metafunc.fixturenames:
        options = metafunc.config.option
        chosen = rows() if options.full else rows_of_run(options.models_of_day)
        metafunc.parametrize("row", chosen, ids=lambda row: row.name)
    if "row_over_ranks" in metafunc.fixturenames:
        chosen = [row for row in rows() if metafunc.config.option.full or row.name in FEW]
        metafunc.parametrize("row_over_ranks", chosen, ids=lambda row: row.name)


@pytest.fixture(autouse=True)
def _plain_numbers(one_thread: None, short_searches: None) -> None:
    """Every test here. Attention of torch.nn has a fast path for inference that rounds otherwise, and that is
    never taken for managed parameters (docs/limits.md)."""
    torch.backends.mha.set_fastpath_enabled(False)
