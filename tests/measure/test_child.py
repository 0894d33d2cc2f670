"""Functions in a process of their own: results, errors, and processes that die."""

import pytest

from gguf_fusion.errors import LoadError
from gguf_fusion.measure.child import call


def test_results_come_back():
    """Arguments and result pass as JSON."""
    assert call("math", "hypot", 3, 4) == 5.0


def test_errors_keep_their_message():
    """An error raised on purpose arrives with its own words."""
    with pytest.raises(LoadError, match="unknown level 'Q9'"):
        call("gguf_fusion.measure.making", "check_levels", ["Q9"])


def test_a_process_that_dies_is_reported():
    """A native assertion ends the child only; the signal is named."""
    with pytest.raises(LoadError, match="SIGABRT"):
        call("os", "abort")


def test_a_defect_is_reported_by_its_last_line():
    """An unexpected exception gives its last line, not a traceback."""
    with pytest.raises(LoadError, match=r"ended by status 1: TypeError"):
        call("math", "hypot", "x")
