import shlex

import pytest
from typer.testing import CliRunner

from kl_plugins.cli import app


@pytest.fixture(scope="session")
def kl_plugins():
    """Runs the command in this process: ``kl_plugins("audit --kl_estimator k2")``."""

    def run(line, expect=0):
        result = CliRunner().invoke(app, shlex.split(line))
        assert result.exit_code == expect, result.output
        return result.output

    return run
