"""A run of tests says which slow lanes it left out."""

from __future__ import annotations

import pytest

from tests.support.paths import REPOSITORY

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_slow_tests_that_were_left_out_are_counted_with_the_command_that_runs_them(
    pytester: pytest.Pytester, processes: str
) -> None:
    pytester.makeini("[pytest]\nmarkers = slow: takes minutes")
    pytester.makeconftest(f"""
        import sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        from tests.support.left_out import LeftOutReport
        def pytest_configure(config):
            config.pluginmanager.register(LeftOutReport(), "left-out-report")
    """)
    pytester.makepyfile(
        test_lanes="""
        import pytest
        def test_quick(): pass
        @pytest.mark.slow
        def test_long(): pass
        @pytest.mark.slow
        def test_longer(): pass
        """
    )
    run = pytester.runpytest_subprocess("-n", processes, "-m", "not slow")
    run.assert_outcomes(passed=1)
    run.stdout.fnmatch_lines(["*slow lanes left out*", "make test-slow: 2 tests: test_lanes.py (2)"])
