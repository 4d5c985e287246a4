import pytest
from workers import Workers


@pytest.fixture(scope="session")
def workers(tmp_path_factory):
    with Workers(tmp_path_factory.mktemp("workers")) as workers:
        yield workers


@pytest.fixture
def train(workers, tmp_path):
    """Function that trains a config of `recorded.py`; every run of a test shares the current folder's assets."""

    def run(name: str, config: str, *flags: str, processes: int = 2) -> tuple[list, str]:
        """What each step recorded, and the log, of rank 0. Outputs are in the folder `name` of `tmp_path`."""
        arguments = ["--module", "recorded", "--config", config, "--debug.seed", "42", "--debug.deterministic"]
        done = workers.run(name, *arguments, *flags, processes=processes, folder=tmp_path)
        return done.records[0], done.logs[0]

    return run
